"""Pages for a browser: one file, in which every text is data, seen in a real browser where there is one."""

from __future__ import annotations

import html
import re
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner, Result
from engines import missing
from fuzz_outputs import PageReader, page_fault
from hostile_texts import ANY, CRAFTED, crafted, often
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_models import moe
from sample_plan import sample_plan
from small_plans import plan_for

from atsplan import main
from commands.page.curve_figure import _scale
from commands.page.elements import FIRST_LINES
from commands.page.page import View, plan_page
from commands.page.words import WORDS
from planner.file_kinds import kind_of
from planner.model.inventory import to_text as inventory_text
from planner.plan.plan import Plan, from_text, to_text
from planner.quoting import message, xml
from planner.site import ON_CPU, Site

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).parent.parent
INPUTS = ROOT / "plans" / "inputs"
QWEN = INPUTS / "Qwen3-30B-A3B-Q4_K_M.inventory.yaml"
PLAN = ROOT / "plans" / "Qwen3.6-35B-A3B-q4_K--rtx4060-8gb-ddr5.yaml"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def run(*words: str | Path | int) -> Result:
    found = CliRunner().invoke(main, [str(word) for word in words], env={"COLUMNS": "80"})
    assert found.exit_code == 0, found.output
    return found


def with_name(name: str) -> Plan:
    """A plan in which everything that strangers name has this name, with hybrid and striped experts too."""
    plan = sample_plan()
    units = tuple(
        unit.model_copy(update={"why": name, "site": site})
        for unit, site in zip(plan.units, map(Site.parse, ("hybrid:CUDA0:3", "stripe:CUDA0:2")), strict=True)
    )
    other = plan.units[0].model_copy(
        update={"unit": f"blk.1.{name}", "site": Site.parse(f"gpu:{name or 'G'}")}
    )
    used = plan.devices[0].model_copy(update={"name": name})
    return plan.model_copy(
        update={
            "command": name,
            "model": plan.model.model_copy(update={"name": name, "architecture": name}),
            "machine": plan.machine.model_copy(update={"name": name}),
            "notes": (name,),
            "units": (*units, other),
            "devices": (*plan.devices, used),
            "baselines": (plan.baselines[0].model_copy(update={"name": name, "setting": name}),),
        }
    )


def test_the_same_plan_gives_the_same_page_which_asks_for_nothing(tmp_path: Path) -> None:
    alone = shutil.copy(PLAN, tmp_path / "plan.yaml")  # without its inputs nothing is solved again
    for name in ("a", "b"):
        run("explain", alone, "--html", tmp_path / f"{name}.html")
    text = (tmp_path / "a.html").read_text()
    assert text == (tmp_path / "b.html").read_text()
    assert text.startswith(FIRST_LINES) and kind_of(text) == "page"
    assert page_fault(text) == ""
    assert "default-src 'none'" in text and not re.search(
        r"@import|url\((?!#)|https?://|fetch\(|import\(", text
    )
    assert len(text) < 200_000


@pytest.mark.parametrize("name", CRAFTED, ids=range(len(CRAFTED)))
def test_texts_of_files_are_data(name: str) -> None:
    text = plan_page(View(with_name(name), 8, name, facts=(name,)))
    assert page_fault(text) == ""
    text.encode()
    assert all(letter.isprintable() or letter == "\n" for letter in text)


def bearing(name: str) -> str:
    """The page of a plan in which every text that is shown as it is bears this name."""
    plan = sample_plan()
    changed = {
        "command": name,
        "notes": (name,),
        "model": plan.model.model_copy(update={"name": name, "architecture": name}),
        "machine": plan.machine.model_copy(update={"name": name}),
        "units": tuple(unit.model_copy(update={"why": name}) for unit in plan.units),
    }
    return plan_page(View(plan.model_copy(update=changed), 8, name or " ", facts=(name,)))


@given(name=ANY)
@crafted("name")
@often
def test_a_name_is_one_value_of_a_page_and_changes_no_element(name: str) -> None:
    found, plain = PageReader(bearing(name)), PageReader(bearing("m" if name else ""))
    shown = xml(message(name))
    assert found.elements == plain.elements and found.raw == plain.raw and found.comments == 1
    assert found.texts["h1"] == [shown] and found.texts["title"][0] == xml(message(f"{name} on {name}"))
    assert found.texts["code"][-2:] == ([shown, shown] if name else plain.texts["code"][-2:])


def test_a_page_that_runs_or_asks_for_something_is_found() -> None:
    good = bearing("m")
    for old, new in (
        ("<h1>m", "<h1><script>1</script>"),
        ("<h1>m", "<h1><img>"),
        ("<h1>m", "<h1 onclick='x()'>"),
        ("<h1>m", "<h1><!-- -->"),
        ("</style>", "b{}</style>"),
        ("</script>", ";1</script>"),
    ):
        assert old in good and page_fault(good.replace(old, new, 1))


def test_the_page_says_every_sentence_that_explain_prints(tmp_path: Path) -> None:
    """Those too that need the model or the profile: checkpoints of conversations, what 1 GiB more buys."""
    page = tmp_path / "plan.html"
    told = run("explain", PLAN, "--html", page).stdout.splitlines()
    assert any("checkpoints" in line for line in told) and any("1 GiB more" in line for line in told)
    shown = html.unescape(page.read_text())
    assert [line for line in told if line not in shown] == []


def test_only_a_page_replaces_a_page(tmp_path: Path) -> None:
    alone, plan, page = (tmp_path / name for name in ("alone.yaml", "plan.yaml", "page.html"))
    for path in (alone, plan):
        path.write_text(to_text(sample_plan()))
    kept = plan.read_bytes()
    refused = CliRunner().invoke(main, ["explain", str(alone), "--html", str(plan)])
    assert (
        refused.exit_code == 2 and "is a plan: not replaced" in refused.output and plan.read_bytes() == kept
    )
    run("explain", alone, "--html", page)
    run("explain", alone, "--html", page)
    over = CliRunner().invoke(main, ["solve", str(QWEN), "--machine", "rtx4060-8gb-ddr5", "-o", str(page)])
    assert over.exit_code == 2 and "is a page: not replaced" in over.output


def test_words_mean_what_the_glossary_says() -> None:
    rows = re.findall(
        r"^\| \*\*(.+?)\*\* \| (.+) \|$", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE
    )
    glossary = {word: meaning.replace("`", "") for word, meaning in rows}
    for word, meaning in WORDS.items():
        assert glossary[word].startswith(meaning), word


# In a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = find_spec("playwright") is not None
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    own = any((Path.home() / ".cache" / "ms-playwright").glob("chromium-*"))
    if not found or not (path or own):
        missing("no playwright or no Chromium", "pip install playwright; apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()


def in_slots(path: Path) -> Plan:
    """A plan of the project with the experts of its CPU in slots, more of them from layer to layer."""
    plan = from_text(path.read_text(), str(path))
    units = tuple(
        unit.model_copy(update={"site": Site.parse(f"hybrid:CUDA0:{8 + index}")})
        if unit.unit.endswith("experts") and unit.site == ON_CPU
        else unit
        for index, unit in enumerate(plan.units)
    )
    return plan.model_copy(update={"units": units})


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, dense_model: Path) -> Path:
    """Pages of a plan, a sweep, a fit and a bench, made by the commands."""
    folder = tmp_path_factory.mktemp("pages")
    machine = ("--machine", "rtx3060-12gb-ddr4")
    (folder / "plan.html").write_text(plan_page(View(in_slots(PLAN), 256, "llama-server --model x.gguf")))
    (folder / "moe.inventory.yaml").write_text(inventory_text(moe()))
    swept = ("--budgets", "1G:5G:2G", "--contexts", "4k,8k", "--html", folder / "sweep.html")
    run("sweep", folder / "moe.inventory.yaml", *machine, *swept)
    run("fit", folder / "moe.inventory.yaml", *machine, "--budget", "2G", "--html", folder / "fit.html")
    (folder / "plan.yaml").write_text(to_text(plan_for(dense_model)))
    here = ("--plan", folder / "plan.yaml", "--device-map", "CUDA0=CPU", "--threads", 1, "--rounds", 1)
    few = ("--against", "all-cpu", "--prompts", 16, "--tokens", 4, "--html", folder / "bench.html")
    run("bench", dense_model, *here, *few)
    (folder / "hostile.html").write_text(plan_page(View(with_name("".join(CRAFTED)), 8, CRAFTED[0])))
    return folder


class Watched:
    """A page of a browser, and everything that it complains of or asks for."""

    def __init__(self, browser: Browser, path: Path, width: int = 1200, scheme: str = "light") -> None:
        self.heard: list[str] = []
        self.asked: list[str] = []
        self.page: Page = browser.new_page(
            viewport={"width": width, "height": 800},
            color_scheme="dark" if scheme == "dark" else "light",
        )
        self.page.on("console", lambda message: self.heard.append(message.text))
        self.page.on("pageerror", lambda error: self.heard.append(str(error)))
        self.page.on("dialog", lambda dialog: self.heard.append(dialog.message))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())


# A page as the browser's own parser takes it: elements, names, what stands in scripts and styles.
_PARSED = """texts => texts.map(text => {
  const page = new DOMParser().parseFromString(text, "text/html");
  const all = selector => [...page.querySelectorAll(selector)];
  return [
    all("*").map(one => [one.localName, ...one.getAttributeNames().sort()].join(" ")).join(),
    page.title, all("h1").map(one => one.textContent), all("code").slice(-2).map(one => one.textContent),
    all("script, style").map(one => one.textContent)];
})"""


def test_the_parser_of_a_browser_finds_the_same_elements_whatever_the_name(browser: Browser) -> None:
    page = browser.new_page()
    page.goto("about:blank")
    ((elements, _, _, codes, raw),) = page.evaluate(_PARSED, [bearing("m")])
    assert elements.count("script") == 1 and len(raw) == 2 and codes == ["m", "m"]

    def one_value_each(names: list[str]) -> None:
        shown = [(xml(message(name)), xml(message(f"{name} on {name}"))) for name in names]
        wanted = [[elements, " ".join(title.split()), [n], [n, n], raw] for n, title in shown]
        assert page.evaluate(_PARSED, list(map(bearing, names))) == wanted

    one_value_each([name for name in CRAFTED if name])
    lists = st.lists(ANY.filter(bool), min_size=1, max_size=30)
    settings(often, max_examples=8)(given(lists)(one_value_each))()
    page.close()


# Numbers of an axis that their drawing cuts off.
_CUT = """() => [...document.querySelectorAll("text.axis")].filter(text => {
  const own = text.getBoundingClientRect(), all = text.ownerSVGElement.getBoundingClientRect();
  return own.width > 0 && (own.left < all.left - 0.5 || own.right > all.right + 0.5);
}).map(text => text.textContent)"""


@pytest.mark.parametrize("name", ["plan", "sweep", "hostile", "fit", "bench"])
@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (360, "dark")])
def test_it_is_drawn_without_complaint(
    browser: Browser, pages: Path, name: str, width: int, scheme: str
) -> None:
    path = pages / f"{name}.html"
    seen = Watched(browser, path, width, scheme)
    page = seen.page
    assert (seen.heard, seen.asked) == ([], [path.as_uri()])
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate(_CUT) == []
    cells = page.locator(".map:visible .cell rect:not(.frame)")
    assert cells.count() > 1 and (cells.first.bounding_box() or {"width": 0})["width"] > 5
    back = page.evaluate("getComputedStyle(document.body).backgroundColor")
    bright = sum(map(int, re.findall(r"\d+", back)[:3])) > 384
    assert bright == (scheme == "light")
    page.close()


def test_cells_terms_and_the_command_answer_to_the_keyboard(browser: Browser, pages: Path) -> None:
    page = Watched(browser, pages / "plan.html").page
    page.locator(".bands").focus()
    for key in ("ArrowRight", "ArrowDown", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    told = page.locator(".told").inner_text()
    assert (
        told.startswith("blk.1.experts: ") and "14 of 256 experts on CUDA0, the others by CPU and bus" in told
    )
    term = page.locator(".term", has_text="gap").first
    term.focus()
    assert term.locator(".tip").is_visible()
    page.keyboard.press("Escape")
    assert not term.locator(".tip").is_visible()
    page.locator(".copy").focus()
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelector('.copied').textContent !== ''")
    page.close()


def test_a_bench_shows_what_was_measured_and_a_fit_what_each_lever_brings(
    browser: Browser, pages: Path
) -> None:
    page = Watched(browser, pages / "bench.html").page
    card = page.locator("section", has=page.locator("h2", has_text="Measured, prompt of 16 tokens"))
    rows = card.locator(".bar-row")
    assert rows.count() == 2 and "this plan" in rows.first.inner_text()
    rates = [float(text.split()[0]) for text in card.locator(".figure b").all_inner_texts()]
    widths = [(rect.bounding_box() or {"width": 0})["width"] for rect in card.locator("rect.bar").all()]
    assert min(rates) > 0 and widths[0] / widths[1] == pytest.approx(rates[0] / rates[1], rel=0.05)
    assert "samples, 95 % interval" in card.inner_text()
    where = page.locator("header").inner_text()
    assert "Measured on another machine with CUDA0 as CPU" in where and "not to be compared" in where
    page.close()
    page = Watched(browser, pages / "fit.html").page
    card = page.locator("section", has=page.locator("h2", has_text="Which lever brings what"))
    levers = card.locator(".row-head strong").all_inner_texts()
    assert levers[:2] == ["placement", "lanes"] and "costs" in card.inner_text()
    assert "all rows move together" in page.locator("main").inner_text()
    page.close()


@pytest.mark.parametrize("most", [0.4, 1, 9.9, 72, 100, 101, 1540])
def test_a_scale_ends_above_everything_drawn_on_it(most: float) -> None:
    ticks = _scale(most)
    assert ticks[0] == 0 and ticks[-1] >= most > ticks[-1] / 2 and 2 <= len(ticks) <= 8


def test_sliders_show_the_point_that_was_solved(browser: Browser, pages: Path) -> None:
    seen = Watched(browser, pages / "sweep.html")
    page = seen.page
    heads = page.locator(".panel:visible h2.wide")
    assert "5 120 MiB, context 8192" in heads.first.inner_text()
    page.locator("#budget").focus()
    page.keyboard.press("ArrowLeft")
    page.locator("#context").focus()
    page.keyboard.press("ArrowLeft")
    assert page.locator(".panel:visible").count() == 1
    assert "3 072 MiB, context 4096" in heads.first.inner_text()
    assert (
        page.locator("figure:visible").count() == 2 and page.locator("figure:visible .dot.now").count() == 2
    )
    page.locator(
        "figure:visible .dot[data-key='0-0'] circle, figure:visible .dot[data-key='0-0'] text"
    ).first.click()
    assert "1 024 MiB, context 4096" in page.locator(".panel:visible").inner_text().replace("\u202f", " ")
    assert not seen.heard
    page.close()
