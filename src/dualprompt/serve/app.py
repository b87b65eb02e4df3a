"""The HTTP API over one saved learner, and the page."""

from __future__ import annotations

import errno
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Security
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse, Response
from fastapi.security import HTTPBearer
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

from dualprompt import __version__
from dualprompt.errors import DualPromptError
from dualprompt.hosted.jobs import Job
from dualprompt.hosted.model import ServedModel, describe
from dualprompt.inbound.guard import Guard, answer_refusal
from dualprompt.inbound.limits import Refusal
from dualprompt.model.names import Kind
from dualprompt.serve.editing import add_editing
from dualprompt.serve.plain import PlainRefusals
from dualprompt.serve.replies import Begun, Drifting, Forgotten, Health, HourCount, ModelInfo, Predictions
from dualprompt.serve.reviewing import add_review
from dualprompt.serve.schema import CHECK, IMAGES, PREDICT, REFUSALS, TEACH, docs_page
from dualprompt.serve.service import Service, Settings

STATIC = Path(__file__).parent / "static"
log = logging.getLogger("dualprompt.serve")
Dependencies = list[Any]  # what FastAPI looks at before a route is called


def create_app(model: ServedModel, settings: Settings) -> FastAPI:
    """Return the application that serves a model; it owns the model from now on."""
    service = Service(model, settings)
    app = FastAPI(
        title="dualprompt",
        version=__version__,
        description="Classify images, teach new classes, forget them. What changes the model needs the server's token, "
        "as the header 'Authorization: Bearer TOKEN'.",
        lifespan=service.running,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.service = service
    app.add_middleware(PlainRefusals)
    app.add_middleware(Guard, rules=settings.rules, observe=service.metrics.observe, most=settings.limits.requests)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")

    # The guard looks at the token, before anything of a request is read; these only tell it to readers of the schema.
    changes = [Security(HTTPBearer(auto_error=False, description="the token that the server tells when it starts"))]
    asks = changes if settings.rules.closed else []
    add_answers(app, service, asks)
    add_learning(app, service, asks, changes)
    add_forgetting(app, service, changes)
    add_editing(app, service, asks, changes)
    add_review(app, service, changes)
    add_insight(app, service, asks)
    add_handlers(app)
    return app


def add_answers(app: FastAPI, service: Service, asks: Dependencies) -> None:
    """Add the page, and what whoever asks may ask."""

    @app.get("/", include_in_schema=False)
    def page() -> FileResponse:
        return FileResponse(STATIC / "index.html")

    @app.get("/healthz", summary="Whether the server answers")
    async def healthz() -> Health:
        return Health(status="ok", model_version=service.model.version)

    about = "What the model knows: tasks, classes, sizes, threshold, accuracies"

    @app.get("/model", summary=about, dependencies=asks, response_model=ModelInfo)
    async def get_model() -> dict[str, Any]:
        return describe(service.model) | {
            "token_required": service.settings.rules.closed,
            "review_days": service.review.days,
        }

    @app.post(
        "/predict",
        summary="Classify images: a form of files, or one image as the body",
        openapi_extra=PREDICT,
        responses=REFUSALS,
        dependencies=asks,
        response_model=Predictions,
    )
    async def predict(
        request: Request,
        top_k: Annotated[int, Query(ge=1, le=100)] = 5,
        threshold: Annotated[float | None, Query(ge=0, le=1, description="instead of the model's")] = None,
    ) -> dict[str, Any]:
        return {"answers": await service.predict(request, top_k, threshold)}

    @app.post(
        "/explain",
        summary="Where it looks on one image, drawn over it as it is seen: squeezed to a square, as PNG",
        openapi_extra=PREDICT,
        responses=REFUSALS,
        dependencies=asks,
        response_class=Response,
    )
    async def explain(request: Request) -> Response:
        return Response(await service.explain(request), media_type="image/png")


def add_learning(app: FastAPI, service: Service, asks: Dependencies, changes: Dependencies) -> None:
    """Add the routes of learning jobs: to see one is to ask, to begin or give up one is to change the model."""

    def known_job(number: int) -> Job:
        if number not in service.jobs.jobs:
            raise Refusal(404, f"there is no job {number}")
        return service.jobs.jobs[number]

    options: dict[str, Any] = {
        "status_code": 202,
        "responses": REFUSALS,
        "dependencies": changes,
        "response_model": Begun,
    }

    @app.post("/tasks", summary="Teach new classes", openapi_extra=TEACH, **options)
    async def teach(request: Request) -> JSONResponse:
        return begun(await service.lessons.take(request, "learn"))

    @app.post("/more", summary="Teach more images of classes that it knows", openapi_extra=IMAGES, **options)
    async def more(request: Request) -> JSONResponse:
        return begun(await service.lessons.take(request, "more"))

    @app.post("/check", summary="Look at images before they are taught", openapi_extra=CHECK, **options)
    async def check(request: Request) -> JSONResponse:
        return begun(await service.lessons.take(request, "check"))

    @app.get("/jobs", summary="All learning jobs on record, the newest last", dependencies=asks)
    async def get_jobs() -> list[Job]:
        return list(service.jobs.jobs.values())

    @app.get("/jobs/{job}", summary="How far a learning job is", responses=REFUSALS, dependencies=asks)
    async def get_job(job: int) -> Job:
        return known_job(job)

    @app.get("/jobs/{job}/findings", summary="What a check found", responses=REFUSALS, dependencies=changes)
    async def findings(job: int) -> dict[str, Any]:
        if known_job(job).kind != "check" or job not in service.jobs.findings:
            raise Refusal(404, f"job {job} has no findings")
        return service.jobs.findings[job]

    @app.delete("/jobs/{job}", summary="Give up a learning job", responses=REFUSALS, dependencies=changes)
    async def cancel(job: int) -> Job:
        service.jobs.cancel(known_job(job))
        return known_job(job)


def begun(job: Job) -> JSONResponse:
    """Return the answer to who has begun a job."""
    url = f"/jobs/{job.id}"
    return JSONResponse({"id": job.id, "url": url}, 202, {"Location": url})


def add_forgetting(app: FastAPI, service: Service, changes: Dependencies) -> None:
    """Add the routes that forget a task or a class."""

    async def forgotten(what: int | str, kind: Kind, purge: bool) -> Forgotten:
        gone = await service.forget(what, kind, purge)
        told = {"forgot": gone.name, "purged": list(gone.purged), "before": gone.before}
        return Forgotten(**told, model_version=service.model.version)

    @app.delete("/tasks/{task}", summary="Forget a task", responses=REFUSALS, dependencies=changes)
    async def forget_task(task: int, purge: bool = False) -> Forgotten:
        return await forgotten(task, "task", purge)

    @app.delete("/classes/{name:path}", summary="Forget a class", responses=REFUSALS, dependencies=changes)
    async def forget_class(name: str, purge: bool = False) -> Forgotten:
        return await forgotten(name, "class", purge)


def add_insight(app: FastAPI, service: Service, asks: Dependencies) -> None:
    """Add the counters, and the page about the API."""

    @app.get("/metrics", summary="Counters for Prometheus", response_class=PlainTextResponse, dependencies=asks)
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(service.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/answers", summary="Answers given hour by hour, and how many were unsure", dependencies=asks)
    async def answers() -> Drifting:
        return Drifting(hours=[HourCount(**asdict(hour)) for hour in service.drift.hours()])

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(docs_page(app.openapi()))


def add_handlers(app: FastAPI) -> None:
    """Make every error one JSON object with one line."""

    @app.exception_handler(Refusal)
    async def refused(_: Request, error: Refusal) -> JSONResponse:
        return answer_refusal(error)

    @app.exception_handler(DualPromptError)
    async def mistaken(_: Request, error: DualPromptError) -> JSONResponse:
        return answer_refusal(Refusal(507 if isinstance(error.__cause__, OSError) else 422, str(error)))

    @app.exception_handler(OSError)
    async def no_room(_: Request, error: OSError) -> JSONResponse:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return answer_refusal(Refusal(507, "the server's disk is full; nothing was changed"))
        log.error("unexpected", exc_info=error)
        return answer_refusal(Refusal(500, "the server failed; its log says why"))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:])
        return answer_refusal(Refusal(422, f"{where}: {first['msg']}"))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        text = f"there is nothing at {request.url.path[:80]}" if error.status_code == 404 else str(error.detail)
        return answer_refusal(Refusal(error.status_code, text, dict(error.headers or {})))

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> JSONResponse:
        return answer_refusal(Refusal(500, "the server failed; its log says why"))
