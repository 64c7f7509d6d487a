"""Say what an unknown key was probably meant to be.

Pure: the tree of a config file in, one sentence for every unknown key out. In this order a key is: a peer's, right but
in another place, misspelt, or simply unknown (then the keys of its section are listed).
"""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from laminar.config.check_plugins import algorithm_option_names
from laminar.config.peers import PEER_NAMES, PEER_NOTES
from laminar.config.schema import ROOT, Path, Place, all_paths, child, format_path, place_at
from laminar.config.section import Plugin

_NEAR = 0.7
"""Least similarity (difflib ratio) at which a name counts as a misspelling."""
_SAME_SECTION_BONUS = 0.1
_MOST_PLACES = 3
_ALGORITHM = ("trainer", "algorithm", "options")
_WITH_OPTIONS = ("environment", "rewards")
"""Tables whose options are others: a key in them is not the algorithm's."""


def unknown_keys(tree: Mapping[str, Any]) -> list[tuple[Path, str]]:
    """Path and sentence of every key of `tree` that the config does not know, in the order of the file."""
    return list(_walk(tree, ROOT, ()))


def hint_for(path: Path, is_table: bool = False) -> str | None:
    """What the unknown key at `path` was probably meant to be, or None if nothing is near."""
    return _of_a_peer(path) or _elsewhere(path, is_table) or _misspelt(path, is_table)


def _walk(value: Any, place: Place, path: Path) -> Iterator[tuple[Path, str]]:
    if isinstance(value, Mapping):
        for key, below in value.items():
            known = child(place, key)
            if known is not None:
                yield from _walk(below, known, (*path, key))
            elif place.section is not None:
                yield from _unknown(below, (*path, key))
    elif isinstance(value, list):
        item = child(place, 0)
        for index, below in enumerate(value if item is not None else []):
            yield from _walk(below, item or place, (*path, index))


def _unknown(value: Any, path: Path) -> Iterator[tuple[Path, str]]:
    is_table = isinstance(value, Mapping)
    kind, hint = "section" if is_table else "key", hint_for(path, is_table)
    below = list(_hinted(value, path, only_peers=hint is not None)) if is_table else []
    if hint or not below:
        yield path, f"unknown {kind} `{format_path(path)}`: {hint or _list_of_keys(path)}"
    yield from below


def _hinted(table: Mapping[str, Any], path: Path, only_peers: bool) -> Iterator[tuple[Path, str]]:
    """What is known of the keys and tables within an unknown table; of one that is misplaced itself, only peers' names."""
    for key, value in table.items():
        below, is_table = (*path, key), isinstance(value, Mapping)
        hint = _of_a_peer(below) if only_peers or is_table else hint_for(below)
        if hint:
            yield below, f"unknown {'section' if is_table else 'key'} `{format_path(below)}`: {hint}"
        if is_table:
            yield from _hinted(value, below, only_peers)


def _elsewhere(path: Path, is_table: bool) -> str | None:
    """A key that is right, but one level too high, too deep, or in another section."""
    places = [known for known, place in all_paths() if known[-1] == path[-1] and (place.section is not None) == is_table]
    if path[-1] in algorithm_option_names() and path[0] not in _WITH_OPTIONS and not is_table:
        places.append((*_ALGORITHM, path[-1]))
    if not places:
        return None
    places.sort(key=lambda known: -_shared_parts(known, path))
    return "it belongs at " + " or ".join(f"`{format_path(known)}`" for known in places[:_MOST_PLACES])


def _of_a_peer(path: Path) -> str | None:
    """What a peer means by this name: by its last parts, as many as are known together, else by the last alone."""
    names = [_plain(part) for part in _names(path)]
    for start in range(len(names)):
        name = ".".join(names[start:])
        if name in PEER_NOTES:
            return PEER_NOTES[name]
        if name in PEER_NAMES:
            return f"here it is `{PEER_NAMES[name]}`"
    return None


def _plain(key: str) -> str:
    return key.lstrip("-").replace("-", "_").lower()


def _misspelt(path: Path, is_table: bool) -> str | None:
    key, best, best_score = str(path[-1]).lower(), None, _NEAR
    for known, place in all_paths():
        if is_table and place.section is None:
            continue
        score = difflib.SequenceMatcher(None, key, str(known[-1])).ratio()
        if _names(known[:-1]) == _names(path[:-1]):
            score += _SAME_SECTION_BONUS
        if score > best_score:
            best, best_score = known, score
    if best is None:
        return None
    best = (*path[:-1], best[-1]) if _names(best[:-1]) == _names(path[:-1]) else best
    return f"did you mean `{format_path(best)}`?"


def _list_of_keys(path: Path) -> str:
    parent = place_at(path[:-1])
    if parent is None or parent.section is None:
        return "there is nothing of that name; remove it"
    keys = ", ".join(parent.section.model_fields)
    if issubclass(parent.section, Plugin):
        return (
            f"the keys here are {keys}; a setting of the implementation itself goes into `{format_path(path[:-1])}.options`"
        )
    return f"the keys here are {keys}"


def _names(path: Path) -> tuple[str, ...]:
    return tuple(part for part in path if isinstance(part, str))


def _shared_parts(one: Path, other: Path) -> int:
    shared = 0
    for mine, theirs in zip(_names(one), _names(other), strict=False):
        if mine != theirs:
            break
        shared += 1
    return shared
