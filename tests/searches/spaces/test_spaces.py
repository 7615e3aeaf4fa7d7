"""What each space's edits are, what it takes behind a colon, and the stretches that it names."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from surgeon.language.operations.applied import Edit
from surgeon.searches.mixture import Mixture
from surgeon.searches.spaces import SPACES, parse_spaces
from surgeon.testing.spaces import small_model


def mixture(spaces: str, family: str = "llama", layers: int = 4, ranks: int = 2) -> Mixture:
    return Mixture(parse_spaces(spaces, ranks), small_model(family, layers))


def shown(edits: Iterable[Edit]) -> list[str]:
    return [str(edit) for edit in edits]


def edits_of(spaces: str, family: str = "llama", layers: int = 4, ranks: int = 2) -> list[str]:
    return shown(mixture(spaces, family, layers, ranks).edits)


def stretches_of(spaces: str, family: str = "llama", layers: int = 4) -> list[list[str]]:
    return [shown(stretch) for stretch in mixture(spaces, family, layers).stretches()]


# Of three layers.
EDITS = {
    "pair": ["pair 0:2", "pair 1:3"],
    "par:3": ["par 0:2", "par 0:3", "par 1:3"],
    "ladder": ["ladder 0:1", "ladder 1:2", "ladder 2:3"],
    "ladder:ranges": [
        "ladder 0:1",
        "ladder 0:2",
        "ladder 0:3",
        "ladder 1:2",
        "ladder 1:3",
        "ladder 2:3",
    ],
    # The first attention misses nothing.
    "ladder:sublayers": [
        *(
            "ladder 0:1 mlp",
            "ladder 1:2 attention",
            "ladder 1:2 mlp",
            "ladder 2:3 attention",
            "ladder 2:3 mlp",
        ),
    ],
    "drop:layers": ["drop 0:1", "drop 1:2", "drop 2:3"],
    "drop:mlp": ["drop 0:1 mlp", "drop 1:2 mlp", "drop 2:3 mlp"],
    "order": ["order 0:2 reversed", "order 1:3 reversed"],
    "order:4": [
        *(
            "order 0:2 reversed",
            "order 0:3 first-to-last",
            "order 0:3 last-to-first",
            "order 0:3 reversed",
        ),
        "order 1:3 reversed",
    ],
    "repeat": ["repeat 0:1", "repeat 0:2", "repeat 1:2", "repeat 1:3", "repeat 2:3"],
    "repeat:1": ["repeat 0:1", "repeat 1:2", "repeat 2:3"],
    "tracks": ["tracks 0:1", "tracks 0:2", "tracks 1:2", "tracks 1:3", "tracks 2:3"],
    "tracks:3": ["tracks 0:1", "tracks 0:2", "tracks 0:3", "tracks 1:2", "tracks 1:3", "tracks 2:3"],
    "tracks:1": ["tracks 0:1", "tracks 1:2", "tracks 2:3"],
    "desync": ["desync 0:1", "desync 1:2", "desync 2:3"],
    "fuse": ["fuse 0:1", "fuse 1:2", "fuse 2:3"],
}
# Where a layer is one step, with attention and MLP side by side.
OF_ONE_STEP = {
    "ladder": ["ladder 1:2", "ladder 2:3"],
    "ladder:sublayers": ["ladder 1:2", "ladder 2:3"],
    "drop:attention": ["drop 0:1 attention", "drop 1:2 attention", "drop 2:3 attention"],
    "tracks": ["tracks 0:2", "tracks 1:3"],
    "desync": [],
    "fuse": [],
}


@pytest.mark.parametrize("space", EDITS)
def test_edits_of_layers_of_two_steps(space: str) -> None:
    assert edits_of(space, layers=3) == EDITS[space]


@pytest.mark.parametrize("space", OF_ONE_STEP)
def test_edits_of_layers_of_one_step(space: str) -> None:
    assert edits_of(space, "gpt_neox", layers=3) == OF_ONE_STEP[space]


def test_drops_are_of_layers_attentions_and_mlps() -> None:
    one_by_one = [edit for kind in ("layers", "attention", "mlp") for edit in edits_of(f"drop:{kind}")]
    assert sorted(edits_of("drop")) == sorted(one_by_one)


@pytest.mark.parametrize(
    ("family", "ranks", "there"),
    [
        ("llama", 1, False),  # nothing to share
        ("llama", 2, True),
        ("llama", 4, False),  # 2 KV heads
        ("gpt_neox", 4, True),
        ("gpt_neox", 8, False),  # 4 heads
        ("opt", 3, False),  # 48 neurons, but 4 heads
        ("gemma2", 2, False),  # a norm after the sublayers, so that slices do not add up
    ],
)
def test_tracks_need_slices(family: str, ranks: int, there: bool) -> None:
    assert bool(edits_of("tracks", family, ranks=ranks)) == there
    assert bool(edits_of("desync", family, ranks=ranks)) == (there and family != "gpt_neox")


@pytest.mark.parametrize(
    ("space", "family", "layers", "ranks", "reason"),
    [
        (
            "tracks",
            "llama",
            4,
            1,
            "it has a slice of the layers for each rank, and one rank has nothing to share",
        ),
        ("desync", "llama", 4, 4, "the 4 heads and 2 KV heads of A0 do not divide into 4 slices"),
        ("tracks", "gemma2", 4, 2, "sublayers of Gemma2 cannot be sliced"),
        ("tracks", "gpt_neox", 1, 2, "the model has 1 layer;"),
        ("desync", "gpt_neox", 4, 2, "attention and MLP of its layers read the same stream already"),
        ("fuse", "gpt_neox", 4, 2, "attention and MLP of its layers read the same stream already"),
        ("pair", "llama", 1, 2, "the model has 1 layer; leave it out"),
        ("rank:0.01", "llama", 4, 2, None),
    ],
)
def test_a_space_without_edits_says_why(
    space: str, family: str, layers: int, ranks: int, reason: str | None
) -> None:
    searching = mixture(f"{space},drop", family, layers, ranks)
    assert any(edit.space != "drop" for edit in searching.edits) == (reason is None)
    if reason is None:
        searching.require_edits()
        return
    with pytest.raises(ValueError, match=f"the space {space} has no edits of {family}: {reason}"):
        searching.require_edits()


def test_tracks_have_a_slice_for_each_rank() -> None:
    searching = mixture("tracks", "gpt_neox", ranks=4)
    (operation,) = searching.operations([Edit.parse("tracks 0:2"), Edit.parse("tracks 2:4")])
    assert operation.to_yaml() == 'tracks: {layers: "0:4", count: 4, depth: 2}'
    program = searching.program([Edit.parse("tracks 0:2"), Edit.parse("tracks 2:4")])
    assert program.sync_points(4) == 2


def test_neighbours_that_are_repeated_are_repeated_apart() -> None:
    searching = mixture("repeat,drop:layers")
    choice = [Edit.parse(text) for text in ("drop 0:1", "repeat 1:2", "repeat 2:4")]
    *_, repeated = searching.operations(choice)
    assert repeated.to_yaml() == 'repeat: {layers: ["1:2", "2:4"]}'
    assert str(searching.program(choice)) == "A1 F1 A1 F1 A2 F2 A3 F3 A2 F2 A3 F3"
    assert searching.exclude(Edit.parse("drop 1:2"), Edit.parse("repeat 1:2"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pair:1", "pair:1 should say how many layers a group has at most, 2 or more, as in pair:4"),
        ("par:x", "par:x should say"),
        ("pair:99999999999999999999", "should say how many layers"),
        (
            "ladder:attention",
            "there is no ladder:attention; write ladder, ladder:sublayers or ladder:ranges",
        ),
        ("drop:layer", "there is no drop:layer; write drop, drop:layers, drop:attention or drop:mlp"),
        ("order:1", "order:1 should say how many layers are moved at most, 2 or more, as in order:4"),
        (
            "repeat:0",
            "repeat:0 should say how many layers are repeated together at most, 1 or more, as in repeat:4",
        ),
        (
            "tracks:0",
            "tracks:0 should say how many layers the tracks run at most before they meet, as in tracks:8",
        ),
        ("desync:2", "the space desync takes no argument; write desync, not desync:2"),
        ("fuse:2", "the space fuse takes no argument"),
        (
            "rank:1",
            "rank:1 should name the shares .* more than 0 and less than 1, as in rank:0.9/0.7/0.5",
        ),
        ("rank:0.5/", "rank:0.5/ should name the shares"),
        ("rank:nan", "rank:nan should name the shares"),
        ("pairs", "unknown space 'pairs'; did you mean 'pair'"),
        ("pair,pair:3", "the space pair is named twice in 'pair,pair:3'"),
        ("", "unknown space ''"),
    ],
)
def test_spaces_that_there_are_not(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_spaces(text)


def test_spaces_stand_in_the_order_of_their_places() -> None:
    named = [space.name for space in parse_spaces(" rank, pair:4 ,tracks,drop")]
    assert named == ["tracks", "drop", "pair", "rank"]
    assert len(parse_spaces(",".join(SPACES))) == len(SPACES)


def test_stretches_of_groups_are_windows() -> None:
    assert stretches_of("pair") == [["pair 0:2", "pair 2:4"], ["pair 1:3"], ["pair 2:4"]]


def test_stretches_of_a_ladder_end_with_the_last_layer() -> None:
    by_layer = [[f"ladder {k}:{k + 1}" for k in range(start, 4)] for start in range(4)]
    assert stretches_of("ladder") == stretches_of("ladder:ranges") == by_layer
    halves = stretches_of("ladder:sublayers", layers=2)
    assert halves == [
        ["ladder 1:2 attention"],
        ["ladder 0:1 mlp", "ladder 1:2 mlp"],
        ["ladder 1:2 mlp"],
        ["ladder 0:1 mlp", "ladder 1:2 attention", "ladder 1:2 mlp"],
        ["ladder 1:2 attention", "ladder 1:2 mlp"],
    ]


def test_stretches_of_tracks_go_on_to_the_end() -> None:
    found = stretches_of("tracks", layers=7)
    assert [f"tracks {k}:{k + 1}" for k in range(7)] in found
    assert ["tracks 0:2", "tracks 2:4", "tracks 4:6", "tracks 6:7"] in found
    assert ["tracks 0:4", "tracks 4:6", "tracks 6:7"] in found
    assert ["tracks 3:7"] in found
    # A single layer of one step is no track.
    assert ["tracks 0:2", "tracks 2:4", "tracks 4:6"] in stretches_of("tracks", "gpt_neox", layers=7)


def test_stretches_of_ranks_have_one_share() -> None:
    everything = [f"rank {k}:{k + 1} {kind}:0.6" for k in range(3) for kind in ("attention", "mlp")]
    found = stretches_of("rank", layers=3)
    assert everything in found
    assert everything[1::2] in found
    assert everything[2:] in found
    assert len(found) == 3 * 3 * 3  # shares, kinds, first layers
