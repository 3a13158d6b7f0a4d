"""Start of the application by the process that drives Ray for `twostroke serve`, and the reason where it does not
start.

An application's own policy, such as the autoscaler, can only be given to Serve in a config, as a file for `serve
deploy`. Serve then builds the application in a process of its own; without a policy that is avoided.
"""

import re
import time
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.context import _get_global_client
from ray.serve.schema import ApplicationStatus, ServeApplicationSchema, ServeDeploySchema

from twostroke.cluster.autoscaling.serve_policy import POLICY_FUNCTION
from twostroke.cluster.config.config import ClusterConfig
from twostroke.cluster.config.model_folder import chat_template_text
from twostroke.cluster.deployments.serve_app import application, cluster_secret
from twostroke.cluster.local.ray import StartFailed
from twostroke.protocol.errors import ConfigError

APPLICATION = "twostroke"
LOOK_S = 0.1
_CONFIG_ERROR = re.compile(r"protocol\.errors\.ConfigError: (.+)")


def deploy(config: ClusterConfig, settings: dict[str, Any]) -> None:
    """Start the application. `settings` are what `config` was read from. Raises StartFailed or ConfigError."""
    try:
        if config.autoscaling.enabled:
            cluster_secret()  # raises here, not in a process of Serve's
            _deploy_as_config(arguments_of(config, settings))
        else:
            serve.run(application(config, cluster_secret()), name=APPLICATION, route_prefix="/")
    except (RuntimeError, RayError) as error:
        # Serve tells a replica's traceback as text, here or in what it says of the deployments.
        application_status = serve.status().applications.get(APPLICATION)
        deployments = application_status.deployments.values() if application_status is not None else ()
        for text in (str(error), *(deployment.message for deployment in deployments)):
            matched = _CONFIG_ERROR.search(text)
            if matched is not None:
                raise ConfigError(matched[1]) from error
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise StartFailed(lines[-1] if lines else "Ray Serve gives no reason") from error


def arguments_of(config: ClusterConfig, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `build_app` for another folder: the settings with this process's own key, absolute paths
    and the chat template."""
    arguments = dict(settings)
    if config.auth.keys:
        arguments["auth"] = config.auth.model_dump(mode="json")
    if config.model.chat_template is not None:
        arguments["model"] = {**settings["model"], "chat_template": chat_template_text(config.model)}
    return arguments


def _deploy_as_config(arguments: dict[str, Any]) -> None:
    """Returns once the application runs. Raises RuntimeError where it does not, with what Serve says of it."""
    client = _get_global_client()
    if client is None:
        raise RuntimeError("Ray Serve does not run")
    client.deploy_apps(
        ServeDeploySchema(
            applications=[
                ServeApplicationSchema(
                    name=APPLICATION,
                    route_prefix="/",
                    import_path="twostroke.cluster.deployments.serve_app:build_app",
                    args=arguments,
                    autoscaling_policy={"policy_function": POLICY_FUNCTION},
                )
            ]
        )
    )
    while True:
        status = serve.status().applications.get(APPLICATION)
        if status is not None and status.status == ApplicationStatus.RUNNING:
            return
        if status is not None and status.status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY):
            raise RuntimeError(status.message)
        time.sleep(LOOK_S)
