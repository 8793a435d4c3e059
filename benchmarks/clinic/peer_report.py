"""What other tools found of the patients of the second trial, beside what ctrans found."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.clinic import second_judging as judge
from benchmarks.clinic.judging import share_of
from benchmarks.clinic.seal import Patient

Row = Mapping[str, Any]
OF_WEIGHTS = ("weightwatcher", "torchlens")
"""Peers that are asked about each patient; the others read or trace a script of each fault."""
OF_SCRIPTS = ("torch-preflight", "traincheck")


@dataclasses.dataclass(frozen=True)
class PeerShare:
    """How many patients of a kind a peer found, and how many of the same ctrans found."""

    peer: str
    kind: str
    hits: int
    of: int
    ours: int

    @property
    def row(self) -> str:
        """Of a table of a page."""
        shares = (share_of(hits, self.of) for hits in (self.hits, self.ours))
        return f"| {self.peer} | {self.kind}s | {' | '.join(shares)} |"


def patient_of(row: Row) -> Patient:
    return Patient(*(row[name] for name in Patient._fields))


def answers(peer: str, of_peers: Sequence[Row]) -> dict[object, bool]:
    """Whether a peer found something, by patient or by fault, where it could be asked."""
    own = [row for row in of_peers if row["peer"] == peer and not row.get("error")]
    if peer in OF_SCRIPTS:
        return {("training", row["fault"]): bool(row["found"]) for row in own}
    return {patient_of(row): bool(row["found"]) for row in own}


def peer_shares(rows: Sequence[Row], of_peers: Sequence[Row]) -> list[PeerShare]:
    """Of the patients that need a fix and that the peer was asked about."""
    sick = [row for row in rows if judge.is_patient(row) and judge.needs_fix(row)]
    made = []
    for peer in (*OF_WEIGHTS, *OF_SCRIPTS):
        said = answers(peer, of_peers)
        for kind in ("model", "training"):
            asked = []
            for row in sick:
                name = patient_of(row) if peer in OF_WEIGHTS else (row["kind"], row["fault"])
                if row["kind"] == kind and name in said:
                    asked.append((said[name], judge.found(row)))
            if asked:
                hits, ours = (sum(column) for column in zip(*asked, strict=True))
                made.append(PeerShare(peer, kind, hits, len(asked), ours))
    return made


def report(rows: Sequence[Row], of_peers: Sequence[Row]) -> list[str]:
    lines = ["Other tools, of the patients that need a fix and that they were asked about"]
    for share in peer_shares(rows, of_peers):
        lines.append(
            f"  {share.peer:16} faults of {share.kind}s: {share_of(share.hits, share.of)};"
            f" ctrans: {share_of(share.ours, share.of)}"
        )
    for peer in (*OF_WEIGHTS, *OF_SCRIPTS):
        own = [row for row in of_peers if row["peer"] == peer]
        named = dict.fromkeys(row["fault"] for row in own if row["found"] and row["fault"])
        healthy = [row for row in own if not row["fault"]]
        if healthy:
            differs = share_of(sum(bool(row["found"]) for row in healthy), len(healthy))
            lines.append(
                f"  {peer} says something else of a healthy one of another seed: {differs}"
            )
        lines.append(f"  {peer} found: {', '.join(named) or 'none'}")
        errors = {row["error"] for row in own if row.get("error")}
        lines += [f"    could not be asked: {error}" for error in sorted(errors)]
    return lines
