"""From a routing trace to what slots that follow the text would serve: by layer and number of slots.

The first half of a trace chooses the seed, its second half judges; prompts only move the scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from planner.constants import PPM
from planner.plan.adaptation import Adaptation, Policy
from planner.plan.plan import FollowedLayer, Following
from planner.routing.cache_simulation import Replay
from planner.routing.residency import PROMPT, Ints, follow
from planner.routing.trace import PAD, Trace, select

POINTS = 8  # numbers of slots a layer that are replayed, evenly spaced
MOST_STEPS = 1024  # of the judged half: enough for a share of hits to about a point
Way = tuple[Policy, int, int, int]
# Half-life in tokens, uploads in hundredths of an expert, a layer and step, and how many misses a step has
# whose experts come on demand. Counts that fade within 32 tokens follow passages as recency does, with fewer
# uploads; what comes unasked costs more than it brings (docs/findings-hybrid.md). Of two misses a fast bus
# brings one in any case, of four a slow one.
CANDIDATES: tuple[Way, ...] = ((Policy.LFU, 32, 100, 2), (Policy.LFU, 32, 100, 4))


def steps_of(trace: Trace) -> tuple[list[Ints], list[int]]:
    """Every pass of the model, source by source, (layers, tokens, experts of a token), and the layers.

    A layer that routed fewer tokens than others in a pass (the last, of a prompt) is filled with -1.
    """
    layers = np.unique(trace.layer)
    place = np.searchsorted(layers, trace.layer)
    key = (trace.source.astype(np.int64) * 2 + trace.decode) << 32 | trace.step
    order = np.argsort(key, kind="stable")
    found = []
    for rows in np.split(order, np.flatnonzero(np.diff(key[order])) + 1) if len(order) else ():
        each = np.bincount(place[rows], minlength=len(layers))
        ids = np.full((len(layers), int(each.max()), trace.n_used), PAD, np.int64)
        by_layer = rows[np.argsort(place[rows], kind="stable")]
        ends = np.cumsum(each)
        for layer, count in enumerate(each.tolist()):
            ids[layer, :count] = trace.ids[by_layer[ends[layer] - count : ends[layer]]]
        found.append(ids)
    return found, [int(layer) for layer in layers]


def sizes(n_expert: int) -> tuple[int, ...]:
    """Numbers of slots that are replayed."""
    return tuple(dict.fromkeys(max(1, n_expert * n // (POINTS + 1)) for n in range(1, POINTS + 1)))


def followings(
    trace: Trace, expert_bytes: Mapping[int, int], candidates: Sequence[Way] = CANDIDATES
) -> tuple[Following, ...]:
    """What each candidate serves; () for a trace with too few decode steps.

    `expert_bytes`: of one expert, by layer; layers that are not in it are left out.
    """
    steps, layers = steps_of(trace)
    keep = [at for at, layer in enumerate(layers) if layer in expert_bytes]
    steps = [ids[keep] for ids in steps]
    layers = [layers[at] for at in keep]
    half = len(steps) // 2
    judged = steps[half : half + MOST_STEPS]
    if len(judged) < PROMPT or not layers:
        return ()
    slots = sizes(trace.n_expert)
    orders = _hottest(steps[:half], trace.n_expert)
    seeds = [order[:k].tolist() for k in slots for order in orders]
    each = [expert_bytes[layer] for layer in layers] * len(slots)
    tiled = [np.tile(ids, (len(slots), 1, 1)) for ids in judged]
    return tuple(
        _one(how, tiled, seeds, trace.n_expert, each, layers, slots)
        for how in (_adaptation(one, max(expert_bytes.values())) for one in candidates)
    )


def replays(trace: Trace, way: Way, order: Ints, slots: Sequence[int], after: int) -> list[Replay]:
    """Decode steps from `after` on, with numbers of slots; `order` (layers, experts): seeds, best first."""
    steps, _ = steps_of(select(trace, trace.decode))
    how = _adaptation(way, PPM)  # all experts alike
    found = []
    for k in slots:
        told = follow(steps[after:], how, order[:, :k].tolist(), trace.n_expert, [PPM] * len(order))
        found.append(Replay(f"slots-{way[0].value}", k, told.hits.sum(axis=1), told.asked.sum(axis=1)))
    return found


def _adaptation(candidate: Way, each: int) -> Adaptation:
    policy, half_life, hundredths, misses = candidate
    return Adaptation(
        policy,
        half_life,
        upload_bytes=each * hundredths // 100,
        refill_bytes=4 * each,
        least_misses=misses,
    )


def _hottest(steps: Sequence[Ints], n_expert: int) -> Ints:
    """Experts of each layer by how often they were chosen; (layers, experts)."""
    counts = np.zeros((len(steps[0]), n_expert), np.int64)
    rows = np.arange(len(counts))[:, None, None]
    for ids in steps:
        np.add.at(counts, (np.broadcast_to(rows, ids.shape)[ids >= 0], ids[ids >= 0]), 1)
    return np.argsort(-counts, axis=1, kind="stable")


def _one(
    how: Adaptation,
    steps: Sequence[Ints],
    seeds: Sequence[Sequence[int]],
    n_expert: int,
    expert_bytes: Sequence[int],
    layers: Sequence[int],
    slots: Sequence[int],
) -> Following:
    found = follow(steps, how, seeds, n_expert, expert_bytes)
    decode = [at for at, ids in enumerate(steps) if ids.shape[1] <= PROMPT]
    hits, asked = found.hits[decode].sum(axis=0), found.asked[decode].sum(axis=0)
    admitted = found.admitted[decode].sum(axis=0)
    shape = (len(slots), len(layers))
    hit_ppm = (hits * PPM // np.maximum(asked, 1)).reshape(shape)
    admitted_ppm = (admitted * PPM // max(len(decode), 1)).reshape(shape)
    return Following(
        policy=how.policy.value,
        half_life=how.half_life,
        upload_bytes=how.upload_bytes,
        refill_bytes=how.refill_bytes,
        least_misses=how.least_misses or None,
        layers=tuple(
            FollowedLayer(
                layer=layer,
                slots=tuple(slots),
                hit_ppm=tuple(int(x) for x in hit_ppm[:, at]),
                admitted_ppm=tuple(int(x) for x in admitted_ppm[:, at]),
            )
            for at, layer in enumerate(layers)
        ),
    )
