"""Routes that change what the model knows without a lesson: other names, one class of several, the threshold, undo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request

from dualprompt.data.folder import one_form
from dualprompt.inbound.limits import Refusal
from dualprompt.inbound.pictures import check_label
from dualprompt.inbound.uploads import read_json
from dualprompt.model import versions
from dualprompt.serve.replies import Changed, VersionInfo, Versions
from dualprompt.serve.schema import REFUSALS, json_body
from dualprompt.serve.service import Service
from dualprompt.serve.wishes import Merge, Rename, Rollback, Threshold

Dependencies = list[Any]


def add_editing(app: FastAPI, service: Service, asks: Dependencies, changes: Dependencies) -> None:
    """Add the routes that rename, merge, set the threshold, list versions and go back to one."""

    def known(name: str) -> None:
        if name not in service.model.learner.classes:
            raise Refusal(404, f"the model knows no class '{name[:80]}'")

    def named(name: str) -> Callable[[set[str]], None]:
        """Have pictures to look at that were called otherwise called so."""
        return lambda lost: service.review.rename(lost, one_form(name))

    def changed() -> Changed:
        return Changed(classes=list(service.model.learner.classes), model_version=service.model.version)

    options: dict[str, Any] = {"responses": REFUSALS, "dependencies": changes}

    @app.post("/rename", summary="Call a class otherwise", openapi_extra=json_body(Rename), **options)
    async def rename(request: Request) -> Changed:
        wanted = await read_json(request, service.limits, Rename)
        known(wanted.old)
        name = check_label(wanted.new, service.limits)
        await service.change(lambda learner: learner.rename(wanted.old, name), named(name))
        return changed()

    @app.post("/merge", summary="Make several classes one", openapi_extra=json_body(Merge), **options)
    async def merge(request: Request) -> Changed:
        wanted = await read_json(request, service.limits, Merge)
        for name in wanted.classes:
            known(name)
        into = check_label(wanted.into, service.limits)
        await service.change(lambda learner: learner.merge(wanted.classes, into), named(into))
        return changed()

    @app.post(
        "/threshold", summary="Set the threshold of 'none of these'", openapi_extra=json_body(Threshold), **options
    )
    async def threshold(request: Request) -> Changed:
        wanted = await read_json(request, service.limits, Threshold)
        await service.change(lambda learner: setattr(learner, "threshold", wanted.threshold))
        return changed()

    @app.get("/versions", summary="The versions of the model that are kept, the newest last", dependencies=asks)
    async def get_versions() -> Versions:
        earlier, current = versions.known(service.model.path)
        found = earlier if current is None else [*earlier, current]
        return Versions(versions=[VersionInfo(**version.to_dict()) for version in found])

    @app.post("/rollback", summary="Go back to an earlier version", openapi_extra=json_body(Rollback), **options)
    async def rollback(request: Request) -> Changed:
        wanted = await read_json(request, service.limits, Rollback)
        earlier = [version.number for version in versions.known(service.model.path)[0]]
        if not earlier:
            raise Refusal(409, "there is no earlier version to go back to")
        if wanted.number is not None and wanted.number not in earlier:
            raise Refusal(404, f"there is no earlier version {wanted.number}")
        await service.rollback(wanted.number)
        return changed()
