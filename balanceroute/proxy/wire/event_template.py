r"""Makes a template of an event, by which `hotpath.EventMatcher` takes later ones apart.

A key is found by its bytes. In valid JSON the bytes `,"token_ids":` or `{"token_ids":` are always that key. Their first
quote follows a comma or brace, not a backslash, so it opens or closes a string. If it closed one, a letter would follow
outside a string, which is not JSON. So it opens one; the second quote, which follows a letter, closes it before a
colon: this is a key. A model's text `"token_ids":[1]` is sent as `\"token_ids\":[1]`, which does not
contain these bytes.
"""

from typing import Final, NamedTuple

_IDS_KEY: Final = b',"token_ids":['


class Template(NamedTuple):
    """An event is `head`, a text, `mid`, token ids, `tail`. `key`: of the text, from its first quote to the text's."""

    key: bytes
    head: bytes
    mid: bytes
    tail: bytes

    def frame(self, out: bytes) -> tuple[bytes, bytes] | None:
        """The bytes before and after the text in an event with null for its ids; None: unknown.

        `out` is what the client got for the event of the template, in the same form.
        """
        if out.count(self.key) != 1:
            return None
        return out[: out.index(self.key) + len(self.key)], self.mid[:-1] + b"null" + self.tail[1:]


def template_of(raw: bytes, name: str) -> Template | None:
    """The template of an ordinary event; None: the event is no model for others.

    `name`: the field with its text, the only one with contents. Otherwise a later event without this text would count
    as one without any.
    """
    if b'"prompt_token_ids":[' in raw or raw.find(b"\n") != len(raw) - 2:
        return None  # prompt ids come only once, and a template covers one line
    key, ids_at = b'"%b":"' % name.encode(), raw.rfind(_IDS_KEY)
    if ids_at <= 0 or raw.count(key) != 1:
        return None
    start = raw.index(key) + len(key)
    stop = raw.find(b'"', start)
    before = raw[start - len(key) - 1 : start - len(key)]
    escaped = raw[stop - 1 : stop] == b"\\"  # the quote may then be part of the text
    if before not in (b",", b"{") or escaped or not start <= stop < ids_at:
        return None
    mid = raw[stop : ids_at + len(_IDS_KEY)]
    return Template(key, raw[:start], mid, raw[raw.index(b"]", ids_at) :])
