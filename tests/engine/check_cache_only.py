#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Counts, from a trace alone, what a prefix cache of whole 512-token blocks must hit when it keeps everything, and what Belady's choice hits with less room;
compares with what kvire_engine --cache-only reports. Shares no code with the engine.

usage: check_cache_only.py KVIRE_ENGINE [TRACE] [--hits N --blocks N]
Without a trace it makes one. --hits and --blocks are what the whole trace is known to give."""
import argparse
import collections
import heapq
import json
import pathlib
import subprocess
import sys
import tempfile

import check_hits


def whole_blocks(trace):
    return [r["hash_ids"][: r["input_length"] // check_hits.BLOCK] for r in trace]


def expected_hits(requests):
    """Blocks of the longest prefix that an earlier request had. A prefix is the whole list of ids up to its end."""
    seen = set()
    hits = 0
    for ids in requests:
        whole = 0
        while whole < len(ids) and (ids[whole], ids[whole - 1] if whole else None) in seen:
            whole += 1
        hits += whole
        seen.update((ids[i], ids[i - 1] if i else None) for i in range(len(ids)))
    return hits


def belady(requests, capacity):
    uses = [block for ids in requests for block in ids]
    later, next_use = {}, [0] * len(uses)
    for i in reversed(range(len(uses))):
        next_use[i] = later.get(uses[i], len(uses))
        later[uses[i]] = i
    held, heap, hits = {}, [], 0
    for i, block in enumerate(uses):
        hits += block in held
        held[block] = next_use[i]
        heapq.heappush(heap, (-next_use[i], block))
        while len(held) > capacity:
            when, victim = heapq.heappop(heap)
            if held.get(victim) == -when:
                del held[victim]
    return hits


def timeline_errors(events, counters):
    """What does not fit together in the story of the pages: each hit on the host was stored before, and is loaded for the request that has it."""
    errors = []
    count = collections.Counter(e["name"] for e in events if e["ph"] != "M")
    for name, expected in (("lookup", counters["lookups"]), ("hit", counters["hit_pages"]), ("publish", counters["published_pages"]),
                           ("load", counters["tier_arrived_pages"]["device"]["full"]), ("store", counters["tier_arrived_pages"]["host"]["full"])):
        if count[name] != expected:
            errors.append(f"timeline: {count[name]} of {name}, expected {expected}")
    missed = sum(e["args"]["pages"] for e in events if e["name"] == "miss")
    if missed != sum(counters["missed_pages"].values()):
        errors.append(f"timeline: {missed} pages missed, expected {sum(counters['missed_pages'].values())}")
    stored, loaded = {}, set()
    for e in events:
        if e["name"] == "store":
            stored.setdefault(e["args"]["prefix"], e["ts"])
        if e["name"] == "load":
            loaded.add((e["pid"], e["args"]["prefix"]))
    for e in events:
        if e["name"] != "hit" or e["cat"] != "host":
            continue
        page = e["args"]["prefix"]
        if stored.get(page, e["ts"]) >= e["ts"] or (e["pid"], page) not in loaded:
            errors.append(f"timeline: request {e['pid']} hit {page} on the host, which was not stored before or not loaded for it")
    return errors


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine")
    parser.add_argument("trace", nargs="?")
    parser.add_argument("--hits", type=int)
    parser.add_argument("--blocks", type=int)
    args = parser.parse_args()
    if args.trace and not pathlib.Path(args.trace).exists():
        print(f"SKIPPED: no trace at {args.trace}; its hits are not checked")
        return 77
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(args.trace or pathlib.Path(folder, "made.jsonl"))
        if args.trace is None:
            path.write_text("".join(json.dumps(r) + "\n" for r in check_hits.made_trace(600)))
        requests = whole_blocks([json.loads(line) for line in path.read_text().splitlines() if line.strip()])
        result = pathlib.Path(folder, "result.json")
        metrics = pathlib.Path(folder, "metrics.txt")
        timeline = pathlib.Path(folder, "timeline.json")
        command = [args.engine, "--cache-only", "--trace", str(path), "--json", str(result), "--metrics", str(metrics)]
        if args.trace is None:  # of a long one it would be large
            command += ["--timeline", str(timeline)]
        status = subprocess.run(command).returncode
        got = json.loads(result.read_text())
        exported = dict(line.rsplit(" ", 1) for line in metrics.read_text().splitlines() if not line.startswith("#"))
        events = json.loads(timeline.read_text())["traceEvents"] if args.trace is None else None
    blocks, hits = sum(map(len, requests)), expected_hits(requests)
    best_device = belady(requests, got["device_blocks"])
    best = belady(requests, got["device_blocks"] + got["host_blocks"])
    wrong = []

    def demand(what, value, expected):
        if value != expected:
            wrong.append(f"{what}: {value}, expected {expected}")

    demand("exit status", status, 0)
    demand("full_blocks", got["full_blocks"], blocks)
    demand("hit_blocks", got["hit_blocks"], hits)
    demand("distinct_blocks", got["distinct_blocks"], len({block for ids in requests for block in ids}))
    demand("belady on the device", got["belady"]["device_hit_blocks"], best_device)
    demand("belady on device and host", got["belady"]["hit_blocks"], best)
    if args.hits is not None:
        demand("hit_blocks of the whole trace", hits, args.hits)
        demand("full_blocks of the whole trace", blocks, args.blocks)
    for run in got["policies"]:
        name = f"{run['policy']} {run['write']}"
        if not 0 < run["device_hit_blocks"] <= best_device:
            wrong.append(f"{name}: {run['device_hit_blocks']} device hits, possible are up to {best_device}")
        if not run["device_hit_blocks"] < run["hit_blocks"] <= best:
            wrong.append(f"{name}: {run['hit_blocks']} hits, possible are up to {best}")
        demand(f"{name}: sum of hits", run["hit_blocks"], run["device_hit_blocks"] + run["host_hit_blocks"])
    demand("policies", len(got["policies"]), 4)
    # The same with bytes, and what is exported of it.
    tiered, counters = got["tiered"], got["tiered"]["counters"]
    demand("tiered cache, hits with room for all", tiered["hit_blocks_with_room_for_all"], hits)
    demand("tiered cache, wrong pages", tiered["wrong_pages"], 0)
    demand("tiered cache, blocks", counters["looked_up_pages"], blocks)
    demand("tiered cache, hits and misses", counters["hit_pages"] + sum(counters["missed_pages"].values()), blocks)
    demand("exported hits", int(exported["kvire_cache_hit_pages_total"]), counters["hit_pages"])
    lookups = counters["lookups"]
    demand("lookups", lookups, len(requests))
    demand("exported lookups by time", int(exported['kvire_cache_seconds_count{work="lookup"}']), lookups)
    demand("exported lookups of any time", int(exported['kvire_cache_seconds_bucket{work="lookup",le="+Inf"}']), lookups)
    demand("times of lookups", counters["times"]["lookup"]["count"], lookups)
    if events is not None:
        wrong += timeline_errors(events, counters)
    demand("exported evictions", int(exported['kvire_cache_tier_evicted_pages_total{tier="device",space="full"}']),
           counters["tier_evicted_pages"]["device"]["full"])
    if not 0 < counters["tier_hit_pages"]["host"] < counters["hit_pages"] <= best:
        wrong.append(f"tiered cache: {counters['hit_pages']} hits, {counters['tier_hit_pages']['host']} of them on the host, possible are {best}")
    print("\n".join(wrong) if wrong else f"{hits} of {blocks} blocks, as expected")
    return 1 if wrong or hits == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
