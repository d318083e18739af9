"""Suggestions for a misspelled name: prefixes and shared tokens first, then edit distance."""

from __future__ import annotations

import re
from collections.abc import Iterable

# Most suggestions for a word.
MOST_SUGGESTIONS = 4
# Similarity (difflib's ratio) from which a spelling is a typing error of one name.
TYPO = 0.88
# From this similarity on, first tokens differ by one missing or extra character. A different digit
# means another product: T4 is not L4.
TYPO_OF_TOKEN = 0.85
# Names below this similarity are unrelated.
LEAST_SIMILARITY = 0.7
# Longer words are not names; comparing them takes time that grows with their square.
LONGEST_WORD = 100
# Shorter tokens, such as the 8 of "8x7b", are ignored.
LEAST_TOKEN = 3


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x' or 'y'?` to append to a sentence about `word`; empty if none is near."""
    found = [f"'{name}'" for name in suggestions(word, known)]
    if not found:
        return ""
    listed = " or ".join([", ".join(found[:-1]), found[-1]] if len(found) > 1 else found)
    return f"; did you mean {listed}?"


def suggestions(word: str, known: Iterable[str]) -> list[str]:
    """The known names that `word` most likely means, the likeliest first; may be empty.

    In this order: the same letters and digits with other separators; one clear typing error; names
    that begin with the word; the longest name that the word begins with; names that share its
    first token; names that share another token; names whose first token is nearly that of the word;
    the nearest by edit distance.
    """
    # Names on a hub begin with the owner: only the last part counts.
    word = word[-LONGEST_WORD:].rpartition("/")[2]
    listed = [name for name in dict.fromkeys(known) if name]
    names = [name for name in listed if not _of_other_line(word, name)]
    family = _tokens(word)[:1]
    if len(names) < len(listed) and not any(_tokens(name)[:1] == family for name in names):
        return []  # its family is known, its line is not: what else is spelled alike is far
    given = _letters_and_digits(word)
    if not given:
        return []
    squeezed = {name: _letters_and_digits(name) for name in names}
    ratio = {name: _similarity(given, squeezed[name]) for name in names}
    same = [name for name in names if squeezed[name] == given]
    if same:
        return same[:1]
    longer = sorted((name for name in names if squeezed[name].startswith(given)), key=len)
    nearest = max(names, key=lambda name: ratio[name], default="")
    if nearest and ratio[nearest] >= TYPO and not longer:
        return [nearest]
    shorter = [
        name for name in names if len(squeezed[name]) > 1 and _begins_with_tokens(word, name)
    ]
    groups = (
        longer,
        sorted(shorter, key=lambda name: -len(squeezed[name]))[:1],
        *_sharing_tokens(word, names, ratio),
        _of_family(word, names, ratio),
        [nearest] if nearest and ratio[nearest] >= LEAST_SIMILARITY else [],
    )
    return next((group[:MOST_SUGGESTIONS] for group in groups if group), [])


def begins_or_nearly(word: str, known: Iterable[str]) -> list[str]:
    """The known names that begin with `word`, or of which it is a clear typing error."""
    given = _letters_and_digits(word[-LONGEST_WORD:])
    return [
        name
        for name in known
        if len(given) >= LEAST_TOKEN
        and (
            _letters_and_digits(name).startswith(given)
            or _similarity(given, _letters_and_digits(name)) >= TYPO
        )
    ]


def _sharing_tokens(
    word: str, names: list[str], ratio: dict[str, float]
) -> tuple[list[str], list[str]]:
    """Names with the same first token, then names with another token in common."""
    given = _tokens(word)
    count = {
        name: len(_identifying_tokens(given) & _identifying_tokens(_tokens(name))) for name in names
    }
    # The shortest name of a product line first.
    ranked = sorted(names, key=lambda name: (-count[name], len(name), -ratio[name]))
    first = [
        name for name in ranked if given[:1] == _tokens(name)[:1] and len(given[0]) >= LEAST_TOKEN
    ]
    most = max(count.values(), default=0)
    shared = [name for name in ranked if most and count[name] == most]
    return first, shared


def _of_family(word: str, names: list[str], ratio: dict[str, float]) -> list[str]:
    """Names whose first token the word begins with, or nearly equals: H100-SXM for H1000."""
    given = _tokens(word)[0]
    families = {token for name in names for token in _tokens(name)[:1] if len(token) >= LEAST_TOKEN}

    def likeness(family: str) -> float:
        return len(family) if given.startswith(family) else _similarity(given, family)

    nearest = max(sorted(families), key=likeness, default="")
    if not nearest or likeness(nearest) < TYPO_OF_TOKEN:
        return []
    kin = [name for name in names if _tokens(name)[:1] == [nearest]]
    return sorted(kin, key=lambda name: (len(name), -ratio[name]))


def _of_other_line(word: str, name: str) -> bool:
    """Whether two names of one family are different lines: gpt-oss-20b is not gpt-neox-20b."""
    given, other = _tokens(word), _tokens(name)
    if given[:1] != other[:1] or not given[:1] or not given[0].isalpha():
        return False
    if not any(part.isdigit() for part in word) or not any(part.isdigit() for part in name):
        return False
    lines = [[one for one in tokens[1:] if one.isalpha()] for tokens in (given, other)]
    return bool(lines[0] and lines[1]) and not any(
        _similarity(one, another) >= LEAST_SIMILARITY for one in lines[0] for another in lines[1]
    )


def _begins_with_tokens(word: str, name: str) -> bool:
    """Whether the tokens of `word` begin with all tokens of `name`."""
    tokens = _tokens(name)
    return _tokens(word)[: len(tokens)] == tokens


def _identifying_tokens(tokens: list[str]) -> set[str]:
    """The tokens that are long enough to identify a name."""
    return {token for token in tokens if len(token) >= LEAST_TOKEN}


def _tokens(text: str) -> list[str]:
    return [token for token in re.split(r"[^a-z0-9]+", text.lower()) if token]


def _letters_and_digits(text: str) -> str:
    """The text's letters and digits in lower case, without separators."""
    return "".join(_tokens(text))


def _similarity(one: str, other: str) -> float:
    import difflib

    return difflib.SequenceMatcher(None, one, other).ratio()
