"""Routes of the queue of pictures that people should look at. All of them need the token, also those that only ask."""

from __future__ import annotations

import asyncio
import io
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from dualprompt.inbound.limits import Refusal
from dualprompt.inbound.pictures import check_label, short
from dualprompt.inbound.uploads import Allowance, read, read_json
from dualprompt.serve.replies import Begun, ReviewItem, ReviewList
from dualprompt.serve.schema import CORRECTION, REFUSALS, json_body
from dualprompt.serve.service import Service, while_here
from dualprompt.serve.wishes import Named

Dependencies = list[Any]
SHOWN = 320  # pixels, at most, of a picture in the queue as the page shows it


def add_review(app: FastAPI, service: Service, changes: Dependencies) -> None:
    """Add the routes of the queue."""
    review = service.review
    options: dict[str, Any] = {"responses": REFUSALS, "dependencies": changes}

    def known(label: str) -> str:
        label = check_label(label, service.limits)
        if label not in service.model.learner.classes:
            raise Refusal(409, f"the model does not know '{short(label)}'; teach it as a new class")
        return label

    @app.get("/review", summary="The pictures that people should look at", **options)
    async def get_review() -> ReviewList:
        items = [ReviewItem(**asdict(item)) for item in review.items()]
        return ReviewList(on=review.days is not None, days=review.days, items=items)

    @app.post("/review", status_code=201, summary="Say that an answer is wrong", openapi_extra=CORRECTION, **options)
    async def correct(request: Request) -> ReviewItem:
        review.refuse_off()
        allowed = Allowance(service.limits.image_bytes + 100_000, service.limits.predict_body_seconds)
        parts = await read(request, service.limits, allowed, {"label", "answered"}, _one_image())
        values = {part.field: part.text.strip() for part in parts if part.filename is None}
        pictures = [part for part in parts if part.filename is not None]
        if len(pictures) != 1 or not values.get("label"):
            raise Refusal(422, "send one image as 'images' and what it shows as 'label'")
        name, content = short(pictures[0].filename or "image"), pictures[0].take()
        label = known(values["label"])
        await while_here(request, service.decoders.small(name, content, SHOWN))  # what cannot be decoded is refused
        label = known(label)  # still: it may have been renamed meanwhile
        item = review.add(content, "wrong", name, short(values.get("answered", "")) or None, label)
        assert item is not None
        return ReviewItem(**asdict(item))

    @app.get("/review/{item}/image", summary="A picture of the queue, small, as PNG", **options)
    async def image(item: int, request: Request) -> Response:
        content, name = review.content(item), review.item(item).name
        shown = await while_here(request, service.decoders.small(name, content, SHOWN))
        file = io.BytesIO()
        await asyncio.to_thread(shown.save, file, "PNG")
        return Response(file.getvalue(), media_type="image/png")

    @app.post("/review/{item}", summary="Say what a picture shows", openapi_extra=json_body(Named), **options)
    async def name_it(item: int, request: Request) -> ReviewItem:
        review.item(item)
        wanted = await read_json(request, service.limits, Named)
        return ReviewItem(**asdict(review.say(item, None if wanted.label is None else known(wanted.label))))

    @app.delete("/review/{item}", summary="Delete a picture of the queue", **options)
    async def remove(item: int) -> ReviewItem:
        found = review.item(item)
        review.remove([item])
        return ReviewItem(**asdict(found))

    @app.post("/review-lesson", status_code=202, summary="Learn the pictures that were named", **options)
    async def learn() -> Begun:
        job = await service.lessons.learn_reviewed()
        return Begun(id=job.id, url=f"/jobs/{job.id}")


def _one_image():  # noqa: ANN202 (a closure of the kind `inbound.uploads.Sink`)
    count = 0

    def sink(name: str, filename: str) -> None:
        nonlocal count
        count += 1
        if name != "images" or count > 1:
            raise Refusal(422, "send one image, in the field 'images'")

    return sink
