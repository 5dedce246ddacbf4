#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Share of the floor against work, from the CSV of kvire_bench_cuda_index_logits, as an SVG.

    plot_shares.py logits.csv shares.svg
"""
import csv
import math
import sys

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 860, 420, 60, 20, 190, 50
COLORS = ["#1b6ca8", "#7fb2d9", "#b8432f", "#e39a8c", "#4d8f3a", "#777777"]
BYTES = {"fp8": 132, "bf16": 256, "fp4": 68}  # of a token


def main(source, target):
    with open(source, newline="") as file:
        rows = [r for r in csv.DictReader(file) if r["right"] == "1" and " x " in r["shape"]]
    series = {}
    for r in rows:
        name = f"{r['keys']}, {r['query_tokens']} query token{'s' if r['query_tokens'] != '1' else ''}"
        if r["kernel"] == "hopper overlap":
            series.setdefault(name, []).append((int(r["tokens"]) * BYTES[r["keys"]] / 1e6, float(r["share_of_floor"])))
    low, high = (f(math.log10(x) for s in series.values() for x, _ in s) for f in (min, max))

    def px(megabytes):
        return LEFT + (math.log10(megabytes) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def py(share):
        return TOP + (1 - share) * (HEIGHT - TOP - BOTTOM)

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
           f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']
    for share in (0, 0.2, 0.4, 0.6, 0.8, 1):
        out.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py(share):.1f}" y2="{py(share):.1f}" stroke="#ddd"/>')
        out.append(f'<text x="{LEFT - 8}" y="{py(share) + 4:.1f}" text-anchor="end">{share:.0%}</text>')
    for power in range(math.ceil(low), math.floor(high) + 1):
        out.append(f'<text x="{px(10.0**power):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{10.0**power:g}</text>')
    out.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 12}" text-anchor="middle">MB of keys a launch</text>')
    for i, (name, points) in enumerate(series.items()):
        color = COLORS[i % len(COLORS)]
        best = {}
        for x, y in points:
            best.setdefault(x, []).append(y)
        line = sorted((x, sum(y) / len(y)) for x, y in best.items())
        out.append(f'<polyline fill="none" stroke="{color}" stroke-width="2" points="{" ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in line)}"/>')
        out += [f'<circle cx="{px(x):.1f}" cy="{py(y):.1f}" r="3" fill="{color}"/>' for x, y in line]
        out.append(f'<text x="{WIDTH - RIGHT + 14}" y="{TOP + 14 + 18 * i}" fill="{color}">{name}</text>')
    with open(target, "w") as file:
        file.write("\n".join(out + ["</svg>"]) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
