/* SPDX-License-Identifier: Apache-2.0 */
/* bfloat16 and float16 as bits, to and from float32: nearest even, with subnormals, infinities and NaN; free of
 * branches, so that loops over them vectorise. */
#ifndef MOER_CPU_CONVERT_H
#define MOER_CPU_CONVERT_H

#include <stdint.h>
#include <string.h>

static inline uint32_t float_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float bits_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float bf16_to_float(uint16_t bits) {
    return bits_float((uint32_t)bits << 16);
}

static inline uint16_t float_to_bf16(float value) {
    uint32_t bits = float_bits(value);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    uint32_t quiet_nan = bits >> 16 | 0x40;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? quiet_nan : rounded);
}

static inline float f16_to_float(uint16_t bits) {
    uint32_t magnitude = (uint32_t)(bits & 0x7fff) << 13;
    /* The exponent's bias goes from 15 to 127; the multiplication also makes subnormals normal. */
    uint32_t finite = float_bits(bits_float(magnitude) * 0x1p112f);
    uint32_t special = magnitude | 0x7f800000;
    return bits_float((uint32_t)(bits & 0x8000) << 16 | (magnitude >= 0x7c00u << 13 ? special : finite));
}

static inline uint16_t float_to_f16(float value) {
    uint32_t bits = float_bits(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    uint32_t normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    /* 0.5 has float16's smallest step as its last place: adding it rounds a subnormal. */
    uint32_t subnormal = float_bits(bits_float(magnitude) + 0.5f) - 0x3f000000;
    uint32_t finite = magnitude < 0x38800000 ? subnormal : normal;
    uint32_t special = magnitude > 0x7f800000 ? 0x7e00 | (magnitude >> 13 & 0x3ff) : 0x7c00;
    return (uint16_t)(sign | (magnitude >= 0x477ff000 ? special : finite));
}

#endif
