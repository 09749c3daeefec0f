"""Every kind of file that is fuzzed, by name."""

from collections.abc import Mapping

from tests.fuzz.others import ARRAYS, RECORDS, TENSORS, TEXT
from tests.fuzz.pefs import PEF
from tests.fuzz.subject import Subject

SUBJECTS: Mapping[str, Subject] = {subject.name: subject for subject in (PEF, TENSORS, ARRAYS, TEXT, RECORDS)}
