"""YAML texts are read within bounds, and by libyaml as in Python."""

from pathlib import Path

import pytest
import yaml

from balanceroute.config import documents
from balanceroute.config.documents import MAX_BYTES, read_document
from balanceroute.errors import ConfigError


def refusal(path: Path, text: str) -> str:
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_document(path)
    return str(refused.value)


def nested(before: str, after: str) -> str:
    """Each of ten lines holds nine times what the one before does."""
    lines = ["a0: &a0 {x: y}"]
    lines += [f"a{i}: &a{i} {before}[{', '.join([f'*a{i - 1}'] * 9)}]{after}" for i in range(1, 10)]
    return "\n".join(lines)


@pytest.mark.parametrize("long", [0, documents.LONG], ids=["long", "short"])
@pytest.mark.parametrize(("before", "after"), [("", ""), ("{<<: ", "}")], ids=["lists", "merge keys"])
def test_repeated_aliases_cost_no_more_than_their_bytes(
    tmp_path: Path, before: str, after: str, long: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "LONG", long)
    message = refusal(tmp_path / "c.yaml", nested(before, after))
    assert "not valid YAML: it stands for more than" in message


@pytest.mark.parametrize("text", ["a: &a [*a]", "a: &a {b: *a}", "? &a [*a]\n: 1"])
def test_a_yaml_value_that_contains_itself_is_refused(tmp_path: Path, text: str) -> None:
    assert "not valid YAML" in refusal(tmp_path / "c.yaml", text)


@pytest.mark.parametrize("long", [0, documents.LONG], ids=["long", "short"])
@pytest.mark.parametrize(
    "value",
    [
        *("!!bool maybe", "!!timestamp soon", '!!int ""', '!!float ""', "!!map [1]", "!!set [1]", "!!int {a: 1}"),
        *("!!seq x", "!!int x", "!!float x", "2026-13-41"),
    ],
)
def test_a_value_that_contradicts_its_yaml_tag_is_reported_with_its_place(
    tmp_path: Path, value: str, long: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "LONG", long)
    message = refusal(tmp_path / "c.yaml", f"a: 1\nb: {value}\n")
    assert message.startswith(f"{tmp_path / 'c.yaml'}: line 2, column 4: not valid YAML: ") and "\n" not in message


@pytest.mark.parametrize("opened", ["[", "{a: ", "- "], ids=["lists", "mappings", "lists in block style"])
def test_values_nested_beyond_any_configuration_are_refused_with_their_place(tmp_path: Path, opened: str) -> None:
    message = refusal(tmp_path / "c.yaml", opened * 1000)
    assert message.startswith(f"{tmp_path / 'c.yaml'}: line 1, column ") and "it is nested more than 64 deep" in message


@pytest.mark.parametrize("long", [0, documents.LONG], ids=["long", "short"])
@pytest.mark.parametrize("number", ["9" * 5000, "-0x" + "9" * 5000])
def test_a_number_of_thousands_of_digits_is_refused_with_its_place(
    tmp_path: Path, number: str, long: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "LONG", long)
    message = refusal(tmp_path / "c.yaml", f"a: 1\nb: {number}\n")
    assert message == f"{tmp_path / 'c.yaml'}: line 2, column 4: not valid YAML: a number of more than 400 digits"


@pytest.mark.parametrize("long", [0, documents.LONG], ids=["long", "short"])
def test_digits_that_only_old_yaml_takes_as_another_number_are_text(long: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`port: 010000` listened on 4096, and `port: 80:00` on 4800."""
    monkeypatch.setattr(documents, "LONG", long)
    text = "{a: 010000, b: 80:00, c: -1:30.5, d: 0, e: 0x10, f: 10.0, g: 1_000}"
    assert documents.values(text) == {
        "a": "010000",
        "b": "80:00",
        "c": "-1:30.5",
        "d": 0,
        "e": 16,
        "f": 10.0,
        "g": 1000,
    }


def test_an_anchor_may_be_named_as_often_as_it_helps(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("a: &a {x: 1}\nb: [*a, *a]\nc: {<<: *a, y: 2}\n")
    assert read_document(tmp_path / "c.yaml") == {"a": {"x": 1}, "b": [{"x": 1}] * 2, "c": {"x": 1, "y": 2}}


def test_a_file_without_an_end_is_too_large() -> None:
    with pytest.raises(ConfigError, match=f"^/dev/zero: is too large; accepted are {MAX_BYTES} bytes$"):
        read_document(Path("/dev/zero"))


@pytest.mark.parametrize(
    "text",
    [
        "a: 1e3\nb: '1e3'\nc: 1_000\nd: 0x1f\ne: 1:30\nf: .inf\ng: ~\nh: yes\ni: 2026-01-01\nj: !!binary aGk=",
        "\ufeffa: 1\r\nb: [1,\r\n 2]\r\n",
        "--- {a: &x [1], b: *x}\n...\n",
        "a: |\n  text\n\n  more\nb: >-\n  text\n  more\n",
        "a: {<<: {b: 1, c: 2}, b: 3}",
        "# nothing\n",
    ],
)
def test_both_yaml_readers_give_the_same_values(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = documents.values(text)
    monkeypatch.setattr(documents, "LONG", 0)
    assert documents.values(text) == read


@pytest.mark.parametrize("text", ["a: [1\n", "a:\n\t- 1\n", "a: 1\na: 2\n", "{1: 2}", "a: !!python/name:os.system"])
def test_both_yaml_readers_report_the_same_error(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(yaml.YAMLError) as first:
        documents.values(text)
    monkeypatch.setattr(documents, "LONG", 0)
    with pytest.raises(yaml.YAMLError) as second:
        documents.values(text)
    assert str(first.value) == str(second.value)
