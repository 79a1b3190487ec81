"""A data directory read without its broker: read only, without a lock, whether a broker has it open or not.

    log = OfflineLog("/var/lib/runnel")
    for batch in log.scan(Selection(topics=("sensors/*",), since_ns=…, tags={"unit": "C"})):
        batch.to_arrow()
    log.report.damage                     # what could not be read; never served, never in the way

offline_log   the directory: journals, segments, topics, plans and scans
selection     which messages: topics, partitions, offsets, times, tags
planning      which blocks hold them, from the index, as pieces of work that can be split
open_segment  one segment's file and index, as far as it may be seen
catalogued    topics, floors and cursors by the catalogue
report        what was met on the way
verifying     every checksum and index of a directory

Nothing here waits on a loop, writes a file or takes a lock. Messages past the age of retention are served as long as
their segment is there: how old is too old is in a broker's settings, not in its files. Purged and deleted ones are not.
"""

from runnel.log.reading.block_plan import PlannedBlock, Stretch
from runnel.log.reading.offline_log import JournalInfo, OfflineLog
from runnel.log.reading.open_segment import SegmentInfo, SegmentName
from runnel.log.reading.report import Report
from runnel.log.reading.selection import Selection
from runnel.log.reading.summaries import PartitionInfo, TopicInfo
from runnel.log.reading.verification import Verified, verify

__all__ = [
    "JournalInfo",
    "OfflineLog",
    "PartitionInfo",
    "PlannedBlock",
    "Report",
    "SegmentInfo",
    "SegmentName",
    "Selection",
    "Stretch",
    "TopicInfo",
    "Verified",
    "verify",
]
