"""A cluster as a picture: nodes, their devices, and the links between them."""

from __future__ import annotations

from shardwise.report.page.markup import Content, Markup, element
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.quantity import write_byte_rate, write_rate

# Most nodes and devices drawn; the rest is a number in words.
_MOST_NODES = 3
_MOST_DEVICES = 8
_WIDTH, _NODE, _GAP, _SIDE = 320, 58, 14, 22


def cluster_picture(cluster: ClusterSpec) -> Markup:
    """An SVG of nodes, devices and links; its title describes it in one sentence."""
    shown = min(cluster.nodes, _MOST_NODES)
    wired = cluster.nodes > 1
    height = shown * (_NODE + _GAP) + (26 if wired else 4)
    drawn: list[Content] = [_node(cluster, number) for number in range(shown)]
    if wired:
        drawn.append(_network(cluster, shown))
    return element(
        "svg",
        element("title", _words(cluster)),
        drawn,
        viewBox=f"0 0 {_WIDTH} {height}",
        role="img",
    )


def _node(cluster: ClusterSpec, number: int) -> list[Content]:
    """The box of node `number`, with its devices and the link between them."""
    top = number * (_NODE + _GAP) + 2
    count = min(cluster.devices_per_node, _MOST_DEVICES)
    squares = [
        element(
            "rect",
            class_="device",
            x=str(14 + place * (_SIDE + 6)),
            y=str(top + 8),
            width=str(_SIDE),
            height=str(_SIDE),
            rx="4",
        )
        for place in range(count)
    ]
    rest = cluster.devices_per_node - count
    more = f" and {rest} more" if rest else ""
    link = f"{cluster.device.link} {write_byte_rate(cluster.device.link_bandwidth)}"
    inside = link if cluster.devices_per_node > 1 else cluster.device.name
    return [
        element("rect", class_="node", x="2", y=str(top), width="262", height=str(_NODE), rx="9"),
        *squares,
        element("text", f"{inside}{more}", x="14", y=str(top + _NODE - 9)),
    ]


def _network(cluster: ClusterSpec, shown: int) -> list[Content]:
    """The lines between nodes, with the bandwidth of the network per device."""
    middles = [number * (_NODE + _GAP) + 2 + _NODE // 2 for number in range(shown)]
    bottom = shown * (_NODE + _GAP)
    wires = [f"M264 {middle}H296" for middle in middles] + [f"M296 {middles[0]}V{bottom}"]
    rest = cluster.nodes - shown
    more = f"and {rest:,} more node{'s' if rest > 1 else ''} · " if rest else ""
    speed = write_rate(cluster.network) if cluster.network else "unknown speed"
    told = f"{more}{speed} per device"
    return [
        element("path", class_="wire", d=" ".join(wires)),
        element("text", told, x="2", y=str(bottom + 16)),
    ]


def _words(cluster: ClusterSpec) -> str:
    """The cluster in words, such as "4 nodes of 8 H100-SXM"."""
    nodes = f"{cluster.nodes:,} nodes of " if cluster.nodes > 1 else "One node of "
    return f"{nodes}{cluster.devices_per_node} {cluster.device.name}"
