"""What a run says of ranks that are dealt round the nodes."""

from sambasim.runtime.transports.network import scattered


def test_blocks_of_neighbouring_ranks_are_no_news() -> None:
    assert scattered([0, 0, 0, 0]) == []
    assert scattered([0, 0, 1, 1]) == []
    assert scattered([0, 1, 2]) == []


def test_ranks_dealt_round_the_nodes_cost_messages() -> None:
    (notice,) = scattered([0, 1, 0, 1])
    assert notice.startswith("4 gradients of each slice travel between 2 nodes, where 2 sums would")


def test_so_does_a_node_that_holds_half_a_block() -> None:
    (notice,) = scattered([0, 0, 0, 1, 1, 1])
    assert notice.startswith("6 gradients of each slice travel between 2 nodes")
