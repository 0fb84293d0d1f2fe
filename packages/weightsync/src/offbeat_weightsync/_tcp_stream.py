"""The rollout engine's side of the TCP transport."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from offbeat_weightsync._connections import Connection
from offbeat_weightsync._peer_stream import PeerStream
from offbeat_weightsync._places import Place


class TcpStream(PeerStream):
    """A `WeightStream` over TCP. Made by `receive`."""

    def _arrive(self, lane: int, indices: Iterable[int]) -> Iterator[tuple[int, Tensor]]:
        room = torch.empty(max(window.num_bytes for window in self._windows), dtype=torch.uint8)
        for index in indices:
            for piece in self._windows[index].pieces:
                part = room[piece.bucket_offset : piece.bucket_offset + piece.num_bytes]
                self._lanes[lane].receive_bytes(part.numpy().data, self._bucket(index))
            yield index, room

    def _load_lane(self, lane: int, indices: list[int], places: list[Place]) -> None:
        """Straight into the engine's tensors."""
        if any(place.bytes is None for place in places):
            for index, memory in self._arrive(lane, indices):
                self._write(index, memory, places)
            return
        connection: Connection = self._lanes[lane]
        for index in indices:
            bucket = self._bucket(index)
            for piece in self._windows[index].pieces:
                room = places[piece.tensor].bytes
                assert room is not None
                connection.receive_bytes(room[piece.tensor_offset : piece.tensor_offset + piece.num_bytes].data, bucket)
