"""Programs: parse and str are inverses; depth and synchronisation counts equal a brute-force walk of the graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from surgeon.language.program import Fork, Node, Program, Step, layer_nodes
from surgeon.language.sublayer import ROLES, LayerShapes, MixtureShapes, Sublayer


@st.composite
def sublayers(draw: st.DrawFn) -> Sublayer:
    kind = draw(st.sampled_from("AF"))
    layers = draw(st.sampled_from(((0,), (3,), (40,), (2, 1), (7, 30, 0))))
    piece = draw(st.sampled_from((None, None, (0, 1), (0, 2), (1, 2), (6, 8))))
    width = draw(st.sampled_from((None, None, 1, 12))) if len(layers) == 1 else None
    chosen = draw(st.integers(0, 15))
    ranks = tuple((role, 3**place) for place, role in enumerate(ROLES[kind]) if chosen >> place & 1)
    experts = draw(st.sampled_from((None, None, (0,), (1, 3, 127)))) if kind == "F" and len(layers) == 1 else None
    return Sublayer(kind, layers, piece, ranks[::-1], width, experts)


steps = st.builds(Step, st.lists(sublayers(), min_size=1, max_size=3).map(tuple), st.booleans())
nodes = st.recursive(
    steps,
    lambda inner: st.lists(st.lists(inner, min_size=1, max_size=3).map(tuple), min_size=1, max_size=4).map(
        lambda branches: Fork(tuple(branches))
    ),
    max_leaves=8,
)
programs = st.lists(nodes, max_size=6).map(lambda found: Program(tuple(found)))


few = settings(max_examples=50, deadline=None)  # drawing a program takes longer than checking it


@few
@given(programs)
def test_parse_is_the_inverse_of_str_whatever_the_white_space(program: Program) -> None:
    assert Program.parse(str(program)) == program
    spread = (
        str(program).replace("[", " [ ").replace("{", "\n{ ").replace("|", "  |").replace("]", " ] ").replace(">", "> ")
    )
    assert Program.parse(spread) == program


def dependency_edges(found: tuple[Node, ...], edges: list[tuple[int, int]], start: int, fresh: list[int]) -> int:
    """Build the graph: every step is an edge of weight 1 to a new vertex; a fork's branches join in one vertex."""
    here = start
    for node in found:
        fresh[0] += 1
        end = fresh[0]
        if isinstance(node, Step):
            edges.append((here, end))
        else:
            ends = [dependency_edges(branch, edges, here, fresh) for branch in node.branches]
            fresh[0] += 1
            end = fresh[0]
            edges += [(e, -end) for e in ends]  # a negative end marks an edge without weight
        here = end
    return here


@few
@given(programs)
def test_depth_is_the_longest_path_of_the_graph(program: Program) -> None:
    edges: list[tuple[int, int]] = []
    last = dependency_edges(program.nodes, edges, 0, [0])
    distance = {0: 0}
    for _ in range(len(edges) + 1):  # Bellman-Ford, looking for the longest path
        for start, end in edges:
            if start in distance:
                distance[abs(end)] = max(distance.get(abs(end), 0), distance[start] + (end > 0))
    assert program.effective_depth() == distance[last] / 2
    assert program.effective_depth(steps_per_layer=1) == distance[last]


def syncs_of_each_rank(found: tuple[Node, ...], ranks: list[int]) -> dict[int, int]:
    """Walk the program as ranks would, dealing branches out, and count what each rank waits for."""
    counts = dict.fromkeys(ranks, 0)
    for node in found:
        if isinstance(node, Fork) and len(node.branches) < len(ranks):
            width = len(ranks) // len(node.branches)
            for index, branch in enumerate(node.branches):
                for rank, count in syncs_of_each_rank(branch, ranks[index * width : (index + 1) * width]).items():
                    counts[rank] += count
            longest = max(counts.values())
            counts = dict.fromkeys(ranks, longest)  # the join: everybody waits for the slowest
        if len(ranks) > 1:
            counts = {rank: count + 1 for rank, count in counts.items()}
    return counts


def spreads(found: tuple[Node, ...], ranks: int) -> bool:
    """Whether every fork, at any depth, has branches enough for its ranks or spreads over them evenly."""
    forks = [node for node in found if isinstance(node, Fork)]
    return all(
        (len(fork.branches) >= ranks or ranks % len(fork.branches) == 0)
        and all(spreads(branch, max(1, ranks // len(fork.branches))) for branch in fork.branches)
        for fork in forks
    )


@few
@given(programs, st.sampled_from([1, 2, 4, 8]))
def test_sync_points_equal_a_walk_of_every_rank(program: Program, ranks: int) -> None:
    if not spreads(program.nodes, ranks):
        with pytest.raises(ValueError, match="does not spread evenly"):
            program.sync_points(ranks)
    else:
        counted = program.sync_points(ranks)
        assert counted == max(syncs_of_each_rank(program.nodes, list(range(ranks))).values())


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("A0 F0 A1 F1", 3),
        ("A0 F0 >A1 >F1 F1", 3),
        ("[A0 F0] [A1 F1]", 2),
        ("A0 {A1 F1 | F2 {F1 | A2}} F3 F3", 2),
        ("A0 {F1 | F2}", 1),
        ("F0 F1", 0),
    ],
)
def test_where_the_last_attention_is(text: str, nodes: int) -> None:
    assert Program.parse(text).attended == nodes


@pytest.mark.parametrize(
    ("text", "depth", "syncs"),
    [
        (str(Program.dense(4)), 4, 8),
        ("A0 F0 [A1 A2] [F1 F2] A3 F3", 3, 6),
        ("A0 F0 >A1 >F1 >A2 >F2 A3 F3", 4, 8),
        ("[A0 F0] [A1 F1] [A2 F2] [A3 F3]", 2, 4),
        ("A0 F0 {A1 F1 | A2 F2} A3 F3", 3, 5),
        ("{A0/2:0 F0/2:0 A1/2:0 F1/2:0 | A0/2:1 F0/2:1 A1/2:1 F1/2:1}", 2, 1),
    ],
)
def test_depth_and_syncs_of_the_published_programs(text: str, depth: float, syncs: int) -> None:
    program = Program.parse(text)
    assert (program.effective_depth(), program.sync_points(2), program.sync_points(1)) == (depth, syncs, 0)


def test_ranks_are_part_of_what_a_sublayer_is() -> None:
    program = Program.parse("[A0@o8,q64 A1] F1/2:0@up3")
    assert str(program) == "[A0@q64,o8 A1] F1/2:0@up3"
    ranked, whole, sliced = program.sublayers()
    assert (ranked.rank("q"), ranked.rank("k"), whole.rank("q"), sliced.rank("up")) == (64, None, None, 3)
    assert ranked == Sublayer("A", (0,), None, (("q", 64), ("o", 8)))
    assert len({ranked, whole, Sublayer("A", (0,))}) == 3
    assert (program.effective_depth(), program.sync_points(2)) == (1, 2)


SHAPES = LayerShapes(
    matrices={"q": (32, 24), "k": (16, 24), "v": (16, 24), "o": (24, 32), "up": (48, 24), "down": (24, 48)},
    biases={"q": 32, "o": 24, "up": 48, "down": 24},
    norms={"A": 24, "F": 48},
    units={"A": 4, "F": 48},
)


def counted(sublayer: Sublayer) -> int:
    """The parameters of modules with these shapes."""
    total = SHAPES.norms[sublayer.kind]
    for role in ROLES[sublayer.kind]:
        if role not in SHAPES.matrices:
            continue
        matrix, bias = torch.empty(SHAPES.matrices[role]), torch.empty(SHAPES.biases.get(role, 0))
        if sublayer.width is not None:  # a KV group of q has 8 rows, of k and v 4
            dim, units = int(role in ("o", "down")), 4 if sublayer.kind == "A" else 48
            matrix = matrix.unflatten(dim, (units, -1)).narrow(dim, 0, sublayer.width).flatten(dim, dim + 1)
            bias = bias if dim or not len(bias) else bias.view(units, -1)[: sublayer.width].flatten()
        rank = sublayer.rank(role)
        left, right = (matrix, None) if rank is None else (matrix[:, :1].expand(-1, rank), matrix[:1].expand(rank, -1))
        if sublayer.piece is not None:
            index, count = sublayer.piece
            if role not in ("o", "down"):  # the rows are divided: of the left factor only
                left, bias = left.chunk(count)[index], bias.chunk(count)[index]
            else:
                bias = bias if index == 0 else bias[:0]
                left, right = (
                    (left.chunk(count, 1)[index], None) if right is None else (left, right.chunk(count, 1)[index])
                )
        total += left.numel() + (0 if right is None else right.numel()) + bias.numel()
    return total


@pytest.mark.parametrize(
    "text",
    [
        "A0",
        "F3",
        "A0~A1",
        "A0/2:0",
        "A0/8:3",
        "F0/4:0",
        "F0/4:1",
        "A1@q5,o7",
        "F1@up24",
        "A0/2:1@q3,k4,v5,o6",
        "F0/3:0@down9",
        "A0#3",
        "F0#7",
        "F1#12/2:1@up5",
        "A0#2/2:0@q7,o16",
    ],
)
def test_parameters_follow_from_shapes(text: str) -> None:
    (sublayer,) = Program.parse(text).sublayers()
    assert sublayer.parameters(SHAPES) == counted(sublayer)
    assert sublayer.weight_bytes(SHAPES, 2) == 2 * counted(sublayer)
    twice = Program.parse(f"{text} {text} A0")
    assert twice.parameters(SHAPES) == sum(counted(one) for one in set(twice.sublayers()))
    assert twice.weight_bytes(SHAPES, 4) == 4 * twice.parameters(SHAPES)


def test_shapes_that_do_not_fit_are_refused() -> None:
    for text, said in (
        ("A0@k17", "A0@k17: rank 17 of k is above that of a matrix of 16 x 24"),
        ("A0/3:0", "32 features of q do not divide into 3 slices"),
        ("A0#5", "A0#5 has more KV groups than the 4 of its layer; use at most 4"),
        ("F0#49", "F0#49 has more neurons than the 48 of its layer; use at most 48"),
        ("A0#2@v9", "rank 9 of v is above that of a matrix of 8 x 24"),
    ):
        with pytest.raises(ValueError, match=said):
            Program.parse(text).parameters(SHAPES)


def test_a_layer_of_one_step_counts_as_one() -> None:
    assert Program.dense(3, steps_per_layer=1).effective_depth(1) == 3
    assert str(Program(layer_nodes(2, 1))) == "[A2 F2]"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("A0 X", "'X' at character 3"),
        ("[A0", "found the end"),
        ("{A0", "closing } is missing"),
        ("A0 ]", "found ']'"),
        ("A1~F2", "averages attention with feed-forward"),
        ("A1/2:2", "must lie in 0..1"),
        ("{ | A0}", "every branch"),
        ("A1~A1", "distinct layers"),
        ("[]", "at least one sublayer"),
        (">{A0}", "found '{'"),
        ("A0@", "'@' at character 2"),
        ("A0@q4,", "',' at character 5"),
        ("A0@up4", "kind A have no matrix 'up'; name some of q, g, k, v, o"),
        ("F0@down0", "rank of down must be at least 1, not 0"),
        ("A0/2:0@q4,k2,q4", "rank of q is given twice"),
        ("A0#0", "a narrowed sublayer keeps at least 1 of its KV groups, not 0"),
        ("F1~F2#3", "F1~F2#3 cannot be: neurons are chosen in each layer by itself"),
        ("F1/2:0#3", "'#3' at character 6"),
        ("{" * 5000, "forks lie more than 50 deep in each other at character 51"),
        ("A" + "9" * 5000, "cannot read '9"),
    ],
)
def test_errors_say_what_was_found_and_where(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=".") as caught:
        Program.parse(text)
    assert said in str(caught.value)


def test_widths_are_part_of_what_a_sublayer_is() -> None:
    program = Program.parse("[A0#3 A1] F1#12/2:0@up3")
    narrow, whole, sliced = program.sublayers()
    assert (narrow.width, whole.width, sliced.width, sliced.piece, sliced.rank("up")) == (3, None, 12, (0, 2), 3)
    assert str(program) == "[A0#3 A1] F1#12/2:0@up3"
    assert narrow != Sublayer("A", (0,))
    assert (program.effective_depth(), program.sync_points(2)) == (1, 2)


def test_the_same_program_with_whole_matrices() -> None:
    program = Program.parse("A0#2@q5 {F0#6/2:0@up3 | [A1 F1@down2]} >A2~A3@v4")
    assert str(program.whole()) == "A0 {F0/2:0 | [A1 F1]} >A2~A3"


def test_programs_are_hashable_and_know_nothing_of_torch() -> None:
    assert len({Program.parse("A0 F0"), Program.dense(1)}) == 1
    with pytest.raises(ValueError, match="ranks must be at least 1"):
        Program.dense(1).sync_points(0)


def test_notebooks_show_a_program_as_its_text_and_as_a_picture() -> None:
    program = Program.parse("A0 F0 >[A1 A2/2:0] {F1@up8 | F2~F3}")
    assert repr(program) == "Program.parse('A0 F0 >[A1 A2/2:0] {F1@up8 | F2~F3}')"
    assert eval(repr(program)) == program
    assert [repr(node) for node in program.nodes[2:]] == ["Step('>[A1 A2/2:0]')", "Fork('{F1@up8 | F2~F3}')"]
    assert repr(program.nodes[0].sublayers[0]) == "Sublayer('A0')"  # type: ignore[union-attr]
    html = program._repr_html_()
    assert all(f">{sublayer}</span>" in html for sublayer in program.sublayers())
    assert html.count("dashed") == 2
    assert "4 steps and forks, 4 one after the other" in html


MIXTURE = LayerShapes(
    {"q": (8, 8), "k": (4, 8), "v": (4, 8), "o": (8, 8), "gate": (12, 8), "up": (12, 8), "down": (8, 12)},
    units={"A": 2, "F": 12},
    mixture=MixtureShapes(experts=4, top_k=2, router=8),
    others={1: LayerShapes({"gate": (20, 8), "up": (20, 8), "down": (8, 20)}, units={"F": 20})},
)


@pytest.mark.parametrize("text", ["A0 F0!e0,e3", ">[F0!e2/2:1@gate4 F3!e0,e1,e2]", "{F1!e0 | F1!e1@down2}"])
def test_experts_are_text(text: str) -> None:
    assert str(Program.parse(text)) == text


@pytest.mark.parametrize(
    ("sublayer", "reason"),
    [
        ({"experts": ()}, "keeps one or more of its experts"),
        ({"experts": (3, 0)}, "in ascending order"),
        ({"experts": (0, 0)}, "in ascending order"),
        ({"kind": "A", "experts": (0,)}, "attention has no experts"),
        ({"layers": (0, 1), "experts": (0,)}, "experts of different layers are not averaged"),
    ],
)
def test_experts_that_cannot_be(sublayer: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Sublayer(**{"kind": "F", "layers": (0,)} | sublayer)


@pytest.mark.parametrize(
    ("text", "parameters", "active"),
    [
        ("F0", 4 * 288 + 32, 2 * 288 + 32),
        ("F0!e0,e3", 2 * 288 + 16, 2 * 288 + 16),
        ("F0!e2", 288 + 8, 288 + 8),
        ("F0/2:1", 4 * 144 + 32, 2 * 144 + 32),
        ("F0@gate3", 4 * (192 + 60) + 32, 2 * (192 + 60) + 32),
        ("F1", 480, 480),
        ("A0 F0 F0", 192 + 4 * 288 + 32, 192 + 2 * 288 + 32),
    ],
)
def test_parameters_of_mixtures(text: str, parameters: int, active: int) -> None:
    program = Program.parse(text)
    assert program.parameters(MIXTURE) == parameters
    assert program.active_parameters(MIXTURE) == active


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("F0!e4", "the experts of layer 0 are 0 to 3, so that it has no 4"),
        ("F1!e0", "the feed-forward of layer 1 is no mixture"),
        ("F0~F2", "experts of different layers are not averaged"),
        ("F0#3", "the neurons of a mixture's experts stay"),
    ],
)
def test_mixtures_that_cannot_be(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Program.parse(text).parameters(MIXTURE)
