"""How long a collective takes: the alpha-beta model of ring, tree and two-level algorithms.

A message of b bytes over one link takes alpha + b * beta seconds. n ranks, N nodes of g ranks each:

    ring all-reduce                2 (n-1) alpha + 2 (n-1)/n b beta          Thakur, Rabenseifner, Gropp (2005), 4.4
    ring reduce-scatter, gather      (n-1) alpha +   (n-1)/n b beta          the same, 4.1 and 4.2
    double binary tree all-reduce  2 ceil(log2 n) alpha + 2 b beta           Sanders, Speck, Traeff (2009), as in NCCL
    direct exchange                  (n-1) o     +   (n-1)/n b beta + alpha  every pair at once; o: cost of a message
    two levels                     inside every node on b, between the nodes on b/g of each rank, g at a time

A flat ring over several nodes runs at the pace of its slowest link, and every node's link carries the whole ring's
bytes. The two-level form sends the same bytes between nodes with N-1 instead of n-1 latencies; the better one counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

Algorithm = Literal["best", "ring", "tree", "direct"]


@dataclass(frozen=True, kw_only=True)
class Link:
    """One level of the network: latency in seconds and bandwidth in bytes a second, each way, of what it connects."""

    latency: float  # alpha
    bandwidth: float  # 1 / beta

    def time(self, messages: float, nbytes: float) -> float:
        return messages * self.latency + nbytes / self.bandwidth


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """N nodes of g ranks.

    Attributes:
        inter: between nodes, the bandwidth of a whole node (all its network cards together).
        intra: inside a node, the bandwidth of each rank.
        efficiency: share of the inter bandwidth that payload gets; 0.956 is TCP over a shaped Ethernet link.
        algorithm: "best" takes the faster of ring, tree and two levels, as NCCL does; "direct" is the exchange of
            this package on gloo, where every rank sends to every other one at once.
    """

    nodes: int
    gpus_per_node: int
    inter: Link
    intra: Link
    efficiency: float = 1.0
    algorithm: Algorithm = "best"

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus_per_node

    def at_bandwidth(self, bandwidth: float) -> Cluster:
        """The same with another bandwidth between the nodes, bytes a second."""
        return replace(self, inter=replace(self.inter, bandwidth=bandwidth))

    def all_reduce(self, nbytes: float) -> float:
        """Seconds for every rank to get the sum of ``nbytes`` held by each."""
        n = self.ranks
        if n == 1:
            return 0.0
        ring = self._flat.time(2 * (n - 1), 2 * (n - 1) / n * nbytes)
        if self.algorithm in ("ring", "direct"):
            return ring
        tree = self._flat.time(2 * math.ceil(math.log2(n)), 2 * nbytes)
        return tree if self.algorithm == "tree" else min(ring, tree, self._two_levels(nbytes, passes=2))

    def reduce_scatter(self, nbytes: float) -> float:
        """Seconds for every rank to get its 1/n of the sum of ``nbytes`` held by each."""
        return self._one_pass(nbytes)

    def all_gather(self, nbytes: float) -> float:
        """Seconds for every rank to get ``nbytes``, of which each holds 1/n."""
        return self._one_pass(nbytes)

    def _one_pass(self, nbytes: float) -> float:
        n = self.ranks
        if n == 1:
            return 0.0
        if self.algorithm == "direct":
            return self._flat.time(1, (n - 1) / n * nbytes)
        ring = self._flat.time(n - 1, (n - 1) / n * nbytes)
        return ring if self.algorithm != "best" else min(ring, self._two_levels(nbytes, passes=1))

    @property
    def _between(self) -> Link:
        return replace(self.inter, bandwidth=self.inter.bandwidth * self.efficiency)

    @property
    def _flat(self) -> Link:
        """The slowest link of a ring over all ranks."""
        if self.nodes == 1:
            return self.intra
        if self.gpus_per_node == 1:
            return self._between
        between = self._between
        slowest = min(self.intra.bandwidth, between.bandwidth)
        return Link(latency=max(self.intra.latency, between.latency), bandwidth=slowest)

    def _two_levels(self, nbytes: float, passes: int) -> float:
        """Ring inside each node, then ring between the nodes on each rank's share, all ranks of a node at once."""
        n, g = self.nodes, self.gpus_per_node
        inside = self.intra.time(passes * (g - 1), passes * (g - 1) / g * nbytes)
        across = self._between.time(passes * (n - 1), passes * (n - 1) / n * nbytes)  # g shares of b/g on one node link
        return inside + across
