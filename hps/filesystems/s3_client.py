"""Asks S3 through boto3, each question within its time."""

import time
from typing import Any

import boto3
import boto3.session
from botocore.config import Config

from hps.configuration.tiers import ModelSourceConfig
from hps.errors import ModelFileError
from hps.filesystems.retries import within
from hps.filesystems.s3_addresses import S3Address
from hps.filesystems.s3_errors import FAILURES, s3_failure

_DEFAULT_REGION = "us-east-1"


class S3Client:
    """One boto3 client a region, made at first use. *Thread-safe.*

    Credentials, profile and, where an address names none, the region come from boto3's standard chain. Nothing is tried again
    here, and an answer that says that the bucket is in another region is not followed.

    Args:
        settings: timeouts, and the endpoint where it is not AWS's.
    """

    def __init__(self, settings: ModelSourceConfig) -> None:
        self._endpoint_url = settings.s3_endpoint_url or None
        self._config = Config(
            connect_timeout=settings.timeout_s,
            read_timeout=settings.timeout_s,
            max_pool_connections=max(32, 2 * settings.parallel_reads),  # several tables may be loaded at a time
            retries={"mode": "standard", "total_max_attempts": 1},
            tcp_keepalive=True,
            response_checksum_validation="when_required",  # a range has none, and the body is read without botocore
            user_agent_extra="hps",
        )
        self._clients: dict[str, Any] = {}

    def call(self, doing: str, address: S3Address, deadline: float, operation: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the boto3 client, in a thread that is left behind at the deadline.

        The thread bounds what boto3 has no timeout for: name servers, sources of credentials, an answer whose head trickles.

        Args:
            doing: for messages, e.g. `reading`.
            address: gives the region and the parameter `Bucket`.
            deadline: by `time.monotonic`.
            operation: e.g. `get_object`.
            parameters: of the operation; a body must not be changed any more, also after an error.

        Raises:
            ModelSourceError: no answer, or a failure that may pass.
            ModelFileError: S3 refused; the error of boto3 is its cause.
        """
        client: Any = None

        def ask() -> dict[str, Any]:
            nonlocal client
            client = self._client(address.region)
            answer: dict[str, Any] = getattr(client, operation)(Bucket=address.bucket, **parameters)
            return answer

        try:
            return within(f"{doing} {address.uri}", max(deadline - time.monotonic(), 0.0), ask)
        except ModelFileError:
            raise
        except FAILURES as error:
            raise s3_failure(doing, address, client, error) from error

    def _client(self, region: str) -> Any:
        client = self._clients.get(region)
        if client is None:
            # Without a lock, because credentials may come over the network; of two made at once, one is kept. A session of its
            # own, because sessions are not thread-safe and the default one is the application's.
            session = boto3.session.Session()
            client = session.client(
                "s3",
                region_name=region or session.region_name or _DEFAULT_REGION,
                endpoint_url=self._endpoint_url,
                config=self._config,
            )
            client.meta.events.register("before-call.s3", _stay_in_region)
            client = self._clients.setdefault(region, client)
        return client


def _stay_in_region(context: dict[str, Any], **_: Any) -> None:
    """Tell botocore that a request was redirected before, so that it is not again.

    botocore asks where the bucket is by HeadBucket, whose redirection it follows in the same way: without end, where no answer
    names the region (seen in 1.44). And whoever reads models from another region than they think pays for every byte.
    """
    context.setdefault("s3_redirect", {})["redirected"] = True
