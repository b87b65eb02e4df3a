"""How much the server takes on, and the one exception with which it refuses more."""

from __future__ import annotations

from dataclasses import dataclass

MEGABYTE = 1024 * 1024


@dataclass(frozen=True)
class Limits:
    """Bounds that keep one client from taking the machine; each is answered with the status that fits."""

    predict_bytes: int = 64 * MEGABYTE  # one request to /predict
    memory_bytes: int = 256 * MEGABYTE  # all requests to /predict together
    teach_bytes: int = 1024 * MEGABYTE  # one request to /tasks
    image_bytes: int = 32 * MEGABYTE
    image_pixels: int = 64_000_000  # by its header
    decoded_pixels: int = 32_000_000  # of one image, as its decoder holds it: up to 24 bytes each
    small_pixels: int = 4_000_000  # images up to here do not wait for larger ones
    queued_pixels: int = 256_000_000  # waiting to be decoded, of all requests
    image_seconds: float = 10.0  # to decode one image
    predict_images: int = 64  # a request
    explaining: int = 4  # requests to /explain in hand
    queued_images: int = 512  # waiting for the network
    task_images: int = 20_000
    task_classes: int = 1000
    archive_entries: int = 40_000  # folders and files that are no images count too
    archive_bytes: int = 4096 * MEGABYTE  # uncompressed
    archive_ratio: float = 100.0
    epochs: int = 500
    queued_jobs: int = 8
    connections: int = 1000  # beyond that the one whose client is silent longest is closed
    requests: int = 400  # that have arrived, in hand at a time; health is told beyond that
    header_bytes: int = 32 * 1024
    header_seconds: float = 10.0  # for a connection to say what it asks
    idle_seconds: int = 5  # between two requests of a connection
    reading_seconds: float = 30.0  # for the client to take an answer
    predict_body_seconds: float = 60.0  # for the client to send a request to /predict
    teach_body_seconds: float = 300.0  # and to /tasks
    stall_seconds: float = 10.0  # after which a body's rate is looked at, again and again
    body_rate: int = 4096  # bytes a second that must arrive
    predict_seconds: float = 60.0  # for an answer
    job_seconds: float = 24 * 3600.0
    name_characters: int = 100
    json_bytes: int = 256 * 1024  # one request that is not of images
    review_images: int = 500  # kept to be looked at, where that is turned on
    review_bytes: int = 512 * MEGABYTE


class Refusal(Exception):  # noqa: N818 (an answer to the client, not a fault of ours)
    """An answer other than the one asked for: a status, one line, perhaps headers."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.headers = status, " ".join(message.split()), headers or {}


def busy(message: str, seconds: int = 1) -> Refusal:
    """Return the refusal of a server that has enough to do."""
    return Refusal(429, message, {"Retry-After": str(seconds)})


def unavailable(message: str, seconds: int = 1) -> Refusal:
    """Return the refusal of a server whose clients together ask too much."""
    return Refusal(503, message, {"Retry-After": str(seconds)})
