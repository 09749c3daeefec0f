"""The README, the table of rules and the tests of damaged files name the same rules."""

import re
from pathlib import Path

from sambasim.pef import rules
from tests.pef.test_damaged_files import CASES

README = Path(rules.__file__).with_name("README.md").read_text(encoding="utf-8")


def test_readme_and_table_agree() -> None:
    stated = re.findall(r"^(\d+)\. \*\*(\w+)\*\*: ", README, re.MULTILINE)
    assert [(int(number), name) for number, name in stated] == [(rule.number, rule.name) for rule in rules.RULES]
    assert [rule.number for rule in rules.RULES] == list(range(1, len(rules.RULES) + 1))


def test_every_rule_is_a_must() -> None:
    for text in re.split(r"^\d+\. ", README.split("## Writing")[0], flags=re.MULTILINE)[1:]:
        assert "MUST" in text


def test_every_rule_is_broken_by_some_test() -> None:
    broken = {number for _, number, _ in CASES.values()} | {rules.CONTENT.number}
    assert broken == {rule.number for rule in rules.RULES}
    assert len(CASES) >= 25


def test_every_rule_is_in_the_part_of_the_readme_about_its_member() -> None:
    part_of = {
        "## `pef.json`": rules.MANIFEST_MEMBER,
        "## `weights.safetensors`": rules.WEIGHTS_MEMBER,
        "## The arguments of operators": rules.MANIFEST_MEMBER,
    }
    for rule in rules.RULES[9:]:
        before = README[: README.index(f"\n{rule.number}. **{rule.name}**")]
        assert part_of[re.findall(r"^## .*$", before, re.MULTILINE)[-1]] == rule.part
