"""The documentation: links lead somewhere, names exist, code compiles, and every feature page has the skeleton."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import zerosharder as zs
from zerosharder import errors
from zerosharder.config import BUILD_VARIABLES, RESERVED_VARIABLES, settings

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CHANGELOG.md", *sorted(DOCS.glob("*.md"))]
FEATURES = [
    "sharding",
    "prefetch",
    "collectives",
    "gradients",
    "mixed_precision",
    "optimizers",
    "checkpoints",
    "hsdp",
    "meta_models",
    "full_params",
    "io",
    "debugging",
]
SKELETON = ["What", "Usage", "How it works", "Interactions", "Limitations"]

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
VARIABLE = re.compile(r"ZEROSHARDER_[A-Z0-9_]*[A-Z0-9]")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def read(page: Path) -> str:
    return page.read_text(encoding="ascii")


def prose(page: Path) -> str:
    return FENCE.sub("", read(page))


def anchors(page: Path) -> set[str]:
    """What a heading is called in a link: lower case, punctuation dropped, spaces as hyphens."""
    titles = HEADING.findall(prose(page))
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def code_blocks() -> list[tuple[Path, int, str]]:
    """(page, line, source) of every block of Python."""
    found = []
    for page in PAGES:
        text = read(page)
        for match in FENCE.finditer(text):
            if match[1] in ("python", "py"):
                found.append((page, text.count("\n", 0, match.start()) + 2, match[2]))
    return found


@pytest.mark.parametrize("name", ["index", "design", "benchmarks", "dev-log", "settings", *FEATURES])
def test_the_page_is_there_and_the_index_leads_to_it(name):
    assert (DOCS / f"{name}.md").is_file()
    if name != "index":
        assert f"{name}.md" in LINK.findall(read(DOCS / "index.md"))


@pages
def test_links_lead_somewhere(page):
    for link in LINK.findall(prose(page)):
        path, _, anchor = link.partition("#")
        assert not re.match(r"[a-z]+:", path), f"{link}: pages of the repository only"
        target = (page.parent / path).resolve() if path else page
        assert target.is_relative_to(REPOSITORY), f"{link} leads out of the repository"
        assert target.exists(), f"{link} leads nowhere"
        if anchor:
            assert anchor in anchors(target), f"{link}: no such heading; there are {sorted(anchors(target))}"


@pages
def test_variables_exist(page):
    known = {info.env for info in settings().values()} | set(RESERVED_VARIABLES) | BUILD_VARIABLES
    unknown = set(VARIABLE.findall(read(page))) - known
    assert not unknown, f"no such setting: {sorted(unknown)}"


@pages
def test_a_page_has_one_title_and_closes_its_blocks(page):
    assert len(re.findall(r"^# ", prose(page), re.MULTILINE)) == 1
    assert read(page).count("```") % 2 == 0
    assert read(page).endswith("\n")


@pytest.mark.parametrize("name", zs.__all__)
def test_every_public_name_is_documented(name):
    text = "\n".join(read(page) for page in DOCS.glob("*.md"))
    assert re.search(rf"\bzs\.{name}\b", text), f"no page says what zs.{name} is"


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_is_documented(name):
    assert f"`{name}`" in read(DOCS / "debugging.md")


def test_names_in_the_documentation_exist():
    for page in PAGES:
        for name in re.findall(r"\bzs\.([a-zA-Z_]+)", read(page)):
            assert hasattr(zs, name), f"{page.name} mentions zs.{name}, which does not exist"


@pytest.mark.parametrize(
    ("page", "line", "source"),
    [pytest.param(*block, id=f"{block[0].name}:{block[1]}") for block in code_blocks()],
)
def test_code_compiles(page, line, source):
    compile(source, f"{page.name}:{line}", "exec")


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_page_has_the_skeleton(name):
    found = re.findall(r"^## (.+)$", prose(DOCS / f"{name}.md"), re.MULTILINE)
    assert found == SKELETON


def test_the_table_of_settings_in_the_readme_gives_the_defaults():
    known = {info.env: info.default_text or "not set" for info in settings().values()}
    rows = re.findall(r"^\| `(ZEROSHARDER_\w+)` \| (.+?) \|", read(REPOSITORY / "README.md"), re.MULTILINE)
    assert rows
    for name, default in rows:
        assert default.strip("`") == known[name], name
