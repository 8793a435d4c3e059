"""The gate of a continuous integration: which findings stop it, and the files that its services
read, SARIF 2.1.0 and JUnit.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

from ctrans import __version__
from ctrans.base.from_json import from_json
from ctrans.base.given_files import read_json
from ctrans.base.json_values import is_number, plain
from ctrans.base.printable import printable
from ctrans.examine.diagnosis.diagnose import Diagnosis, readings_in
from ctrans.measure.findings import SEVERITIES, Finding, in_a_paragraph
from ctrans.report.contents import page_of
from ctrans.report.sections import decoded
from solvers import ConfigError, shown

LEVELS = {"broken": "error", "serious": "error", "note": "note"}
"""Severities in the words of SARIF."""
SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
Baseline = Mapping[str, Any]
"""The models of an earlier diagnosis by name, each as its JSON object."""


@dataclasses.dataclass(frozen=True)
class _Place:
    place: str


@dataclasses.dataclass(frozen=True)
class _EarlierFinding:
    check: str
    place: str
    places: list[_Place]


@dataclasses.dataclass(frozen=True)
class _EarlierModel:
    """What a comparison reads of a model in a baseline."""

    readings: dict[str, list[_Place]]
    findings: list[_EarlierFinding]


def read_baseline(path: Path) -> Baseline:
    """The models in the JSON of an earlier `ctrans diagnose`. Raises ConfigError for another
    file.
    """
    result = read_json(path)
    if (
        not isinstance(result, dict)
        or result.get("command") != "diagnose"
        or not isinstance(result.get("placements"), dict)
        or not result["placements"]
    ):
        raise ConfigError(
            f"--baseline {str(path)!r} is no result of ctrans diagnose: give the file of its --json"
        )
    page_of({str(path): result})  # raises ConfigError for what no diagnosis writes
    try:
        for model in result["placements"].values():
            from_json(_EarlierModel, model)
            readings_in(model)
    except ConfigError as error:
        raise ConfigError(f"--baseline {str(path)!r} is no whole diagnosis: {error}") from None
    readings = (
        reading
        for model in result["placements"].values()
        for readings_of_quantity in model["readings"].values()
        for reading in readings_of_quantity
    )
    for reading in readings:
        value = reading["value"]
        if isinstance(value, list) or not is_number(value):
            raise ConfigError(
                f"--baseline {str(path)!r} has the value {shown(value)}, and readings are numbers"
            )
        for entry in ("figure", "place"):
            if not isinstance(reading.get(entry), str):
                raise ConfigError(
                    f"--baseline {str(path)!r} is damaged: a reading has the {entry}"
                    f" {shown(reading.get(entry))}, which must be a text"
                )
    models: Baseline = decoded(result["placements"])
    return models


def of_baseline(baseline: Baseline, name: str) -> Any:
    """The model of that name, or the only one. Raises ConfigError if there is none."""
    if name not in baseline and len(baseline) > 1:
        raise ConfigError(
            f"--baseline has no model {name!r}: it has {', '.join(map(repr, baseline))}"
        )
    if name in baseline:
        return baseline[name]
    return next(iter(baseline.values()))


def stopping(diagnosis: Diagnosis, severity: str, earlier: Any = None) -> list[Finding]:
    """The findings of this severity or a worse one, except those that the model `earlier` of a
    baseline has at all of their places.
    """
    names = [str(name) for name in SEVERITIES]
    severities = names[: names.index(severity) + 1]
    earlier_places: set[tuple[str, str]] = set()
    if earlier:
        for finding in earlier["findings"]:
            for at in finding["places"] or [finding]:
                earlier_places.add((finding["check"], at["place"]))
    stops = []
    for new_finding in diagnosis.findings:
        places = {(new_finding.check, at.place) for at in new_finding.readings}
        if new_finding.severity in severities and not places <= earlier_places:
            stops.append(new_finding)
    return stops


def sarif(diagnoses: Mapping[str, Diagnosis], paths: Mapping[str, str]) -> bytes:
    """The findings as SARIF 2.1.0. A location is the path of the model, or of the later one of a
    change, with the place as a logical one.
    """
    rules = {
        f"{diagnosis.checks.topic}/{name}": diagnosis.checks[name]
        for diagnosis in diagnoses.values()
        for name in diagnosis.checks
    }
    results = [
        {
            "ruleId": f"{finding.topic}/{finding.check}",
            "level": LEVELS[finding.severity],
            "message": {"text": _words(finding)},
            "locations": [
                {
                    "physicalLocation": {
                        "artifactLocation": {"uri": quote(os.fsencode(paths[name]))},
                        "region": {"startLine": 1},
                    },
                    "logicalLocations": [{"fullyQualifiedName": printable(f"{name}: {at.place}")}],
                }
                for at in finding.readings
            ],
        }
        for name, diagnosis in diagnoses.items()
        for finding in diagnosis.findings
    ]
    about = [
        {
            "id": name,
            "shortDescription": {"text": check.description},
            "help": {"text": check.remediation},
            "defaultConfiguration": {"level": LEVELS[check.severity]},
        }
        for name, check in rules.items()
    ]
    driver = {"name": "ctrans", "version": __version__, "rules": about}
    return json.dumps(
        {
            "$schema": SCHEMA,
            "version": "2.1.0",
            "runs": [{"tool": {"driver": driver}, "results": results}],
        },
        indent=1,
    ).encode()


def junit(diagnoses: Mapping[str, Diagnosis], stops: Mapping[str, list[Finding]]) -> bytes:
    """A suite for each model and change with a case for each check: failed where a finding stops
    the gate, skipped where the check was not measured.
    """
    root = ElementTree.Element("testsuites", name="ctrans diagnose")
    for name, diagnosis in diagnoses.items():
        numbers = {
            "tests": len(diagnosis.checks),
            "failures": len(stops[name]),
            "skipped": len(diagnosis.unexamined),
        }
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            {"name": printable(name)} | {key: str(n) for key, n in numbers.items()},
        )
        findings = {finding.check: finding for finding in diagnosis.findings}
        for check in diagnosis.checks:
            case = ElementTree.SubElement(suite, "testcase", classname=printable(name), name=check)
            if check in diagnosis.unexamined:
                ElementTree.SubElement(case, "skipped", message="not measured")
            elif findings.get(check) in stops[name]:
                finding = findings[check]
                ElementTree.SubElement(
                    case, "failure", type=finding.severity, message=printable(finding.place)
                ).text = _words(finding)
            elif check in findings:
                ElementTree.SubElement(case, "system-out").text = _words(findings[check])
    document: bytes = ElementTree.tostring(root, "utf-8", xml_declaration=True)
    return document


def _words(finding: Finding) -> str:
    return printable(in_a_paragraph(plain(dataclasses.asdict(finding))))
