"""The connector in an engine of a test that counts blocks: it waits for its node's daemon however
long a machine stalls. With its own limits a daemon that is late is a miss, as it should be, and the
count is another one.
"""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))

from patience import ANSWER_S, be_patient

from prefixfleet.cluster import engine_client
from prefixfleet.cluster.connector import PrefixfleetConnector

__all__ = ["PrefixfleetConnector"]

be_patient(pytest.MonkeyPatch())  # for as long as the process lives
engine_client.CONNECT_S = ANSWER_S
