"""Small named checks around a run. Each yields what it found, or nothing; `about` asks them all."""

from llamafactory_preflight.findings.certain import stops
from llamafactory_preflight.findings.disk import disk_after_data
from llamafactory_preflight.findings.packages import bad_pairs
from llamafactory_preflight.findings.together import Surroundings, about


__all__ = ["Surroundings", "about", "bad_pairs", "disk_after_data", "stops"]
