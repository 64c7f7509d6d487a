"""TensorBoard: event files written with TensorBoard's own writer, which needs neither torch nor TensorFlow.

Invariant: one point a step. What begins anew at step s says so, and TensorBoard hides older points from s on.
"""

from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from laminar.telemetry.sinks.base import Line, scalars


class TensorBoardWriter:
    """Writes lines into one folder.

    Args:
        folder: of the event files; each life adds one.
    """

    failures: tuple[type[Exception], ...] = (OSError, ValueError)

    def __init__(self, folder: Path) -> None:
        self._writer: Any = EventFileWriter(str(folder))

    def write(self, line: Line) -> None:
        """Scalars of a step or an evaluation; a mark as text."""
        if line["kind"] == "mark":
            values = [_text("marks", str(line["text"]))]
        else:
            values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in scalars(line).items()]
        self._writer.add_event(Event(wall_time=line["time"], step=line["step"], summary=Summary(value=values)))

    def rewind(self, step: int) -> None:
        """Hide what is above this step."""
        self._begin_at(step + 1)

    def flush(self) -> None:
        """Write out."""
        self._writer.flush()

    def close(self) -> None:
        """Write out and end."""
        self._writer.close()

    def _begin_at(self, step: int) -> None:
        self._writer.add_event(Event(step=step, session_log=SessionLog(status=SessionLog.START)))


def _text(tag: str, text: str) -> Any:
    """A value for TensorBoard's text page."""
    tensor = TensorProto(
        dtype=DT_STRING,
        tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
        string_val=[text.encode()],
    )
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    return Summary.Value(tag=tag, tensor=tensor, metadata=metadata)
