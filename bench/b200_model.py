#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the fused kernel should take on a B200, by a model with three numbers that times of an H200 determine.

A call takes as long as its slowest part: a block of the weight gradient's, a block of grad_hidden_states', or what goes
through memory; and a constant. A block's tile takes as many clocks as the busier of two: shared memory, 128 bytes a
clock, written by copies and read by products and stores; or the tensor cores. Tiles take some factor longer than that,
since a block has no other work while it waits; that factor, the constant and memory's share of its peak are fitted to an
H200's times, and are then taken for a B200's. Prints two tables an operation in Markdown."""
import math

# Multiprocessors, GHz, FLOPs a clock and multiprocessor (bfloat16, dense), TB/s. The public suite runs a B200 at 1.5 GHz.
H200 = dict(processors=132, clock=1.98, flops=4096, memory=4.8, tokens=64, weight_columns=64)
B200 = dict(processors=148, clock=1.5, flops=8192, memory=8.0, tokens=128, weight_columns=128)
# The suite's numbers of tokens.
TOKENS = {"softmax": [1024, 1056, 1087, 1088, 1120, 1152, 1163, 1184, 1216, 1248, 1249, 1280, 2048, 3557, 8192, 65536],
          "sigmoid": [1280, 1312, 1321, 1344, 1376, 1408, 1440, 1721, 2048, 2131, 2521, 3011, 3072, 3557, 6144, 8192]}
# Measured on an H200 with this division of the work (h200-2026-11-30.md), microseconds.
MEASURED = {"softmax": {1024: 7.52, 1088: 7.74, 1280: 8.16, 2048: 10.4, 3557: 16.5, 8192: 32.2},
            "sigmoid": {1280: 15.8, 1440: 17.0, 2048: 20.4, 3072: 26.5, 8192: 57.6}}
OPERATIONS = {"softmax": dict(hidden=2048, experts=128, sparse=False),
              "sigmoid": dict(hidden=5120, experts=160, sparse=True)}
PUBLISHED = {"softmax": 15.2, "sigmoid": 24.0}


def clocks(gpu, rows, columns, terms, loaded, stored):
    """Of a tile's product and of the bytes that copies and stores move through shared memory for it."""
    products = terms // 16
    read = products * (rows + columns) * 16 * 2
    return max((loaded + read + stored) / 128, products * 2 * rows * columns * 16 / gpu["flops"])


def parts(gpu, hidden, experts, sparse, tokens):
    """Microseconds of a weight block, of a hidden block and of memory, each as fast as can be."""
    tile, width = gpu["tokens"], gpu["weight_columns"]
    tiles, slices = math.ceil(tokens / tile), math.ceil(hidden / width)
    logits = tile * experts * 2  # bytes of G, as it stands in shared memory
    if gpu is H200:  # 64 experts a warpgroup, or a block
        blocks = math.ceil(experts / 64)
        split = blocks if slices * blocks <= gpu["processors"] / 2 else 1
        part = 64 * blocks // split
        weight = sum(clocks(gpu, 64, width, tile, 0, 0) for _ in range(part // 64))
        weight += (tile * width * 2 + (logits if sparse else tile * part * 2)) / 128
    else:
        part = 32
        while slices * math.ceil(experts / part) > gpu["processors"] * 9 // 16:
            part += 32
        split = math.ceil(experts / part)
        weight = clocks(gpu, width, part, tile, tile * width * 2 + (logits if sparse else tile * part * 2), 0)
    item = clocks(gpu, tile, 128, experts, logits, 2 * tile * 128 * 2)
    left = max(gpu["processors"] - slices * split, gpu["processors"] // 4)
    items = math.ceil(math.ceil(hidden / 128) * tiles / left)
    microsecond = gpu["clock"] * 1e3
    return tiles * weight / microsecond, items * item / microsecond, 2 * tokens * hidden * 2 / gpu["memory"] / 1e6


def model(gpu, numbers, operation, tokens):
    constant, factor, share = numbers
    weight, hidden, memory = parts(gpu, **OPERATIONS[operation], tokens=tokens)
    return constant + max(factor * weight, factor * hidden, memory / share)


def fit(operation):
    """The three numbers that leave the least relative errors, by looking at all of a grid."""
    def error(numbers):
        return sum((model(H200, numbers, operation, tokens) / time - 1) ** 2 for tokens, time in MEASURED[operation].items())
    return min(((constant / 10, factor / 20, share / 20) for constant in range(20, 120) for factor in range(20, 60)
                for share in range(8, 19)), key=error)


def geomean(values):
    return math.exp(sum(map(math.log, values)) / len(values))


def main():
    for operation, measured in MEASURED.items():
        numbers = fit(operation)
        print(f"\n{operation}: constant {numbers[0]:.1f} us, factor {numbers[1]:.2f}, share of memory {numbers[2]:.2f}\n")
        print("| H200, N | weight block | hidden block | memory | model | measured |\n|---|---|---|---|---|---|")
        for tokens, time in measured.items():
            bare = parts(H200, **OPERATIONS[operation], tokens=tokens)
            print(f"| {tokens} | " + " | ".join(f"{part:.1f}" for part in bare) +
                  f" | {model(H200, numbers, operation, tokens):.1f} | {time} |")
        print("\n| B200, N | weight block | hidden block | memory | model |\n|---|---|---|---|---|")
        times = {tokens: model(B200, numbers, operation, tokens) for tokens in TOKENS[operation]}
        for tokens, time in times.items():
            bare = parts(B200, **OPERATIONS[operation], tokens=tokens)
            print(f"| {tokens} | " + " | ".join(f"{part:.1f}" for part in bare) + f" | {time:.1f} |")
        print(f"| geomean | | | | {geomean(times.values()):.1f}, published {PUBLISHED[operation]} |")


if __name__ == "__main__":
    main()
