"""Types that a device has no kernel for: measured as such, kept off it, found where a plan has them there."""

from __future__ import annotations

from planning_models import machine, moe, plan, sites

from planner.check.check import CheckOptions, Inputs, check_plan
from planner.machine.op_time import Case
from planner.machine.profile import OpTiming, Unsupported
from planner.plan.plan import to_text
from planner.site import Site
from profiler.operators.cases import NOT_SUPPORTED, Job, Place
from profiler.summarise import Verdict, unsupported, without_kernels

GPU = Place("CUDA0", "CUDA0", "own")


def without(op: str, kind: str) -> Unsupported:
    return Unsupported(op=op, type=kind, device="CUDA0")


def test_what_a_device_cannot_compute_is_kept_off_it_and_a_plan_that_does_not_is_found() -> None:
    profile = machine().model_copy(update={"unsupported": (without("MUL_MAT_ID", "q4_K"),)})
    usual, made = plan(moe(), "20000"), plan(moe(), "20000", on=profile)
    assert set(sites(usual, "experts").values()) == {"gpu:CUDA0"}
    assert set(sites(made, "experts").values()) == {"cpu"}
    assert set(sites(made, "attention").values()) == {"gpu:CUDA0"}
    assert "CUDA0 cannot compute MUL_MAT_ID of q4_K: such weights are kept off it" in made.notes
    edited = [
        p.model_copy(update={"site": Site.on("CUDA0")}) if p.unit == "blk.0.experts" else p
        for p in made.units
    ]
    wrong = made.model_copy(update={"units": tuple(edited)})
    found = check_plan(wrong, to_text(wrong), "p", Inputs(moe(), profile), CheckOptions(resolve=False))
    assert any("blk.0.experts" in f.message and "not possible" in f.message for f in found)


def test_other_types_and_operators_are_not_touched() -> None:
    usual = plan(moe(), "20000")
    for one in (without("MUL_MAT_ID", "q6_K"), without("MUL_MAT", "iq2_xs")):
        profile = machine().model_copy(update={"unsupported": (one,)})
        made = plan(moe(), "20000", on=profile)
        assert made.units == usual.units and made.notes == usual.notes


def test_a_profile_shows_once_what_a_place_has_no_kernels_for() -> None:
    def verdict(kind: str, rows: int, refused: bool) -> Verdict:
        case, place = Case("MUL_MAT", kind, (256, rows), 1), Place("CPU", "CPU_REPACK", "repack")
        timing = OpTiming(
            op=case.op, type=kind, shape=case.shape, batch=1, device="CPU", buffer="CPU_REPACK",
            time_ns=1, spread_ns=0, samples=1,
        )  # fmt: skip
        return Verdict(Job(case, place), None if refused else timing, NOT_SUPPORTED if refused else "")

    judged = [verdict("q5_0", 8, True), verdict("q5_0", 16, True), verdict("q4_K", 8, True)]
    found = without_kernels([*judged, verdict("q4_K", 16, False), verdict("q8_0", 8, False)])
    assert {place: list(products) for place, products in found.items()} == {
        "CPU from CPU_REPACK": ["MUL_MAT q5_0", "MUL_MAT q4_K 256x8"]
    }


def test_only_products_refused_at_every_shape_are_recorded() -> None:
    def verdict(kind: str, rows: int, place: Place, refused: bool, op: str = "MUL_MAT") -> Verdict:
        case = Case(op, kind, (256, rows), 1)
        timing = OpTiming(
            op=op, type=kind, shape=case.shape, batch=1, device=place.device, buffer=place.buffer,
            time_ns=1, spread_ns=0, samples=1,
        )  # fmt: skip
        return Verdict(Job(case, place), None if refused else timing, NOT_SUPPORTED if refused else "")

    judged = [
        verdict("mxfp4", 8, GPU, True),
        verdict("mxfp4", 16, GPU, True),
        verdict("q4_K", 8, GPU, True),
        verdict("q4_K", 16, GPU, False),
        verdict("q8_0", 8, Place("CPU", "CPU_REPACK", "repack"), True),
        verdict("f32", 8, GPU, True, "RMS_NORM"),
    ]
    assert unsupported(judged) == (without("MUL_MAT", "mxfp4"),)
