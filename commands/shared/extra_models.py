"""What stock tools load beside a model: a plan's projector and draft, or files given for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.plan.load_spec import LoadSpec
    from planner.plan.plan import Plan


def projector_fields(plan: Plan, mapped: Mapping[str, str], spec: LoadSpec, path: str) -> dict[str, Any]:
    """The fields of a Stock that speak of the projector in `path`; "" for none.

    One that the plan does not know follows the plan's GPUs: the tools would take any GPU there is.
    """
    from planner.constants import CPU

    if not path:
        return {}
    device = first_gpu(spec)
    if plan.projector is not None:
        device = mapped.get(plan.projector.device, plan.projector.device)
    return {"mmproj": path, "mmproj_on_cpu": device == CPU}


def draft_fields(plan: Plan, mapped: Mapping[str, str], spec: LoadSpec, path: str) -> dict[str, Any]:
    """The fields of a Stock that speak of drafting: the plan's device and length, for the model in `path`.

    A model that the plan does not know follows the plan's GPUs. Without a path only the model's own
    NextN block can draft; where the plan decided to draft nothing, nobody does.
    """
    planned = plan.speculation
    if planned is not None and not planned.tokens:
        return {"drafts": False}  # it does not pay, and the plan holds no memory for it
    if planned is not None and planned.ngrams:
        return {"ngrams": True, "draft_tokens": planned.tokens}
    if not path and (planned is None or planned.draft):
        return {}
    device = first_gpu(spec) if path else ""
    if planned is None:
        return {"draft": path, "draft_device": device}
    device = mapped.get(planned.device, planned.device) or device
    apart = {"draft_experts_on_host": True} if planned.experts_on_host else {}
    return {"draft": path, "draft_device": device, "draft_tokens": planned.tokens, **apart}


def uncounted_draft(plan: Plan) -> str:
    """What to say of a draft model that the plan does not count on; "" when it does."""
    if plan.speculation is not None and not plan.speculation.tokens:
        return "the plan decided to draft nothing: no options for a draft model"
    if plan.speculation is not None and plan.speculation.ngrams:
        return "the plan drafts by n-grams and holds no memory for a draft model: no options for it"
    if plan.speculation is None and not any(each.name == "draft" for each in plan.constraints.reserves):
        return "the plan holds no memory for a draft model: solve with --draft counts it"
    return ""


def first_gpu(spec: LoadSpec) -> str:
    """The first device beside the CPU that a spec names, else the CPU."""
    from planner.constants import CPU

    return next((device for device in spec.devices if device != CPU), CPU)


def missing_files(plan: Plan, projector: bool, draft: bool) -> list[str]:
    """What the plan counts on beside the model and is not given, one sentence each."""
    planned, found = plan.speculation, []
    if plan.projector is not None and not projector:
        found.append(f"the plan leaves room for the projector {plan.projector.name}: give it with --mmproj")
    if planned and planned.tokens and planned.draft and not draft:
        found.append(
            f"the plan's times count on {planned.tokens} guesses a pass of {planned.draft}: "
            "give it with --draft"
        )
    return found
