"""Programs: parse and str are inverses; depth and synchronisation counts equal a brute-force walk of the graph."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surgeon.language.program import Fork, Node, Program, Step, layer_nodes
from surgeon.language.sublayer import ROLES, Sublayer


@st.composite
def sublayers(draw: st.DrawFn) -> Sublayer:
    kind = draw(st.sampled_from("AF"))
    layers = draw(st.sampled_from(((0,), (3,), (40,), (2, 1), (7, 30, 0))))
    piece = draw(st.sampled_from((None, None, (0, 1), (0, 2), (1, 2), (6, 8))))
    width = draw(st.sampled_from((None, None, 1, 12))) if len(layers) == 1 else None
    chosen = draw(st.integers(0, 15))
    ranks = tuple((role, 3**place) for place, role in enumerate(ROLES[kind]) if chosen >> place & 1)
    experts = (
        draw(st.sampled_from((None, None, (0,), (1, 3, 127))))
        if kind == "F" and len(layers) == 1
        else None
    )
    return Sublayer(kind, layers, piece, ranks[::-1], width, experts)


steps = st.builds(Step, st.lists(sublayers(), min_size=1, max_size=3).map(tuple), st.booleans())
nodes = st.recursive(
    steps,
    lambda inner: st.lists(
        st.lists(inner, min_size=1, max_size=3).map(tuple), min_size=1, max_size=4
    ).map(lambda branches: Fork(tuple(branches))),
    max_leaves=8,
)
programs = st.lists(nodes, max_size=6).map(lambda found: Program(tuple(found)))


few = settings(max_examples=50, deadline=None)  # drawing a program takes longer than checking it


@few
@given(programs)
def test_parse_is_the_inverse_of_str_whatever_the_white_space(program: Program) -> None:
    assert Program.parse(str(program)) == program
    spread = (
        str(program)
        .replace("[", " [ ")
        .replace("{", "\n{ ")
        .replace("|", "  |")
        .replace("]", " ] ")
        .replace(">", "> ")
    )
    assert Program.parse(spread) == program


def dependency_edges(
    found: tuple[Node, ...], edges: list[tuple[int, int]], start: int, fresh: list[int]
) -> int:
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
                for rank, count in syncs_of_each_rank(
                    branch, ranks[index * width : (index + 1) * width]
                ).items():
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


@pytest.mark.thorough
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
    assert Program.parse(text).attended_nodes == nodes


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
    assert (program.effective_depth(), program.sync_points(2), program.sync_points(1)) == (
        depth,
        syncs,
        0,
    )


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
    assert [repr(node) for node in program.nodes[2:]] == [
        "Step('>[A1 A2/2:0]')",
        "Fork('{F1@up8 | F2~F3}')",
    ]
    assert repr(program.nodes[0].sublayers[0]) == "Sublayer('A0')"  # type: ignore[union-attr]
    html = program._repr_html_()
    assert all(f">{sublayer}</span>" in html for sublayer in program.sublayers())
    assert html.count("dashed") == 2
    assert "4 steps and forks, 4 one after the other" in html
