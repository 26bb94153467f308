"""Words of the glossary that stand on a page, and what they mean: as docs/glossary.md says it."""

from __future__ import annotations

from commands.page.elements import Node, element

WORDS = {
    "bound": "a time below which no placement can get, proven by the solver",
    "budget": "bytes of a device for everything: weights, KV, state, compute buffers, caches, driver",
    "gap": "how far a plan's time is above its bound; 0 is proven optimal",
    "hybrid": "experts of a layer in slots of GPU memory, the others computed by the CPU or brought by "
    "the bus at the same time",
    "layer device": "the device that llama.cpp gives a layer: owns its KV cache, recurrent state and norms",
    "plan": "a YAML file with every decision, what it rests on and what it is predicted to cost",
    "request": "one prompt and its answer: what the solver makes fast; also the record of what a person "
    "asked of the planner",
    "reserve": "memory left to something else: driver, projector, draft model, other programs",
    "site": "placement of a unit: where its bytes live and who computes with them",
    "state": "what a recurrent layer keeps of a sequence in place of a KV cache; its size does not grow "
    "with the context",
    "stock rule": "what llama.cpp's own options would do",
    "stripe": "expert-split buffer: the hottest experts of a layer in GPU memory, the others in host "
    "memory behind the same addresses",
    "unit": "tensors that must move together: a layer's attention, its dense FFN, its experts, its "
    "recurrent mixer, the output head",
}


def term(word: str, shown: str = "") -> Node:
    """A word with its meaning, shown where it is pointed at, or reached with the Tab key."""
    meaning = element("span", WORDS[word], class_="tip", role="tooltip")
    return element("span", shown or word, meaning, class_="term", tabindex=0)
