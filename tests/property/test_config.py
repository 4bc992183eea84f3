"""Whatever a user writes, it is a configuration or one line that says what is wrong."""

from hypothesis import given, settings
from hypothesis import strategies as st

from balanceroute.config import describe_settings, effective, load, validate
from balanceroute.errors import ConfigError

WORKERS = {"prefill.workers": [{"url": "http://p:1"}], "decode.workers": [{"url": "http://d:1"}]}
NAMES = sorted({part for setting in describe_settings() for part in setting.path.replace("[]", "").split(".")})
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["nixl", "http://d:1"])
)
KEYS = st.sampled_from(NAMES) | st.text(max_size=3)
TREES = st.dictionaries(
    KEYS,
    st.recursive(SCALARS, lambda below: st.lists(below, max_size=3) | st.dictionaries(KEYS, below, max_size=3)),
)
VALID = effective(
    validate({"prefill": {"workers": [{"url": "http://p:1"}]}, "decode": {"workers": [{"url": "http://d:1"}]}})
)
SECTIONS = sorted(name for name, section in VALID.items() if isinstance(section, dict))


@st.composite
def nearly_valid(draw: st.DrawFn) -> dict[str, object]:
    """A whole configuration with other values in a few places, which may be good ones."""
    tree = {name: dict(section) if isinstance(section, dict) else section for name, section in VALID.items()}
    for _ in range(draw(st.integers(0, 2))):
        section = tree[draw(st.sampled_from(SECTIONS))]
        section[draw(st.sampled_from(sorted(section)))] = draw(st.integers(1, 9) | st.floats(0.1, 1) | SCALARS)
    return tree


@settings(max_examples=60, deadline=None)
@given(st.one_of(nearly_valid(), nearly_valid(), TREES))
def test_any_tree_is_accepted_or_refused_in_one_line(tree: dict[str, object]) -> None:
    try:
        config = validate(tree)
    except ConfigError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert effective(validate(effective(config))) == effective(config)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([s.path for s in describe_settings() if "[]" not in s.path]), st.text(max_size=12))
def test_any_text_in_any_variable_is_accepted_or_refused_with_its_name(path: str, text: str) -> None:
    variable = "BALANCEROUTE_" + path.upper().replace(".", "__")
    try:
        load(None, {variable: text}, WORKERS if path not in WORKERS else {})
    except ConfigError as error:
        assert len(str(error).splitlines()) == 1
        assert variable in str(error) or path in WORKERS
