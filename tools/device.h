/* SPDX-License-Identifier: Apache-2.0 */
/* A call on the device where it is to run: the tensors of a call on the host are copied there, and what was written
 * comes back. Where that device is the host, both calls have the same tensors and nothing is copied. */
#ifndef MOER_TOOLS_DEVICE_H
#define MOER_TOOLS_DEVICE_H

#include "call.h"

/* Makes placed the same call as host, with its tensors on the device. device_release() is due either way. */
enum moer_status device_place(const struct call *host, DLDevice device, struct call *placed);

/* Copies the tensors of that kind back to the host; waits for the device. */
enum moer_status device_fetch(const struct call *host, const struct call *placed, enum moer_kind kind);

/* Frees what is not the host's. */
void device_release(const struct call *host, struct call *placed);

#endif
