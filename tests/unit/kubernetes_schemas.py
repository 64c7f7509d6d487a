"""JSON schemas of our manifests: field names and types of KubeRay's API reference (ray.io/v1) and of Kubernetes 1.28.

Written by hand and strict: a field that is not listed is refused, so a misspelt one is found. They list what the reference
lists for KubeRay's own objects, and of pods, services and stateful sets the fields that we use or may soon use.
"""

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string", "minLength": 1}
WHOLE: Schema = {"type": "integer", "minimum": 0}
YES_NO: Schema = {"type": "boolean"}
NAME: Schema = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$"}
QUANTITY: Schema = {"type": ["string", "integer"], "pattern": r"^\d+(\.\d+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"}
TEXTS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}


def table(required: str = "", **fields: Schema) -> Schema:
    """An object with these fields and no others."""
    return {"type": "object", "additionalProperties": False, "properties": fields, "required": required.split()}


def many(items: Schema) -> Schema:
    """A list."""
    return {"type": "array", "items": items}


METADATA = table("", name=NAME, generateName=TEXT, namespace=NAME, labels=TEXTS, annotations=TEXTS)
QUANTITIES: Schema = {"type": "object", "additionalProperties": QUANTITY}
RESOURCES = table("", requests=QUANTITIES, limits=QUANTITIES)
COMMAND = many({"type": "string"})
PROBE = table(
    "",
    exec=table("command", command=COMMAND),
    httpGet=table("port", path=TEXT, port={"type": ["integer", "string"]}, scheme={"enum": ["HTTP", "HTTPS"]}),
    tcpSocket=table("port", port={"type": ["integer", "string"]}),
    initialDelaySeconds=WHOLE, periodSeconds=WHOLE, timeoutSeconds=WHOLE, failureThreshold=WHOLE, successThreshold=WHOLE,
)  # fmt: skip
PORT = table(
    "containerPort", name={"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9]{0,13}[a-z0-9])?$"},
    containerPort={"type": "integer", "minimum": 1, "maximum": 65535}, protocol={"enum": ["TCP", "UDP"]},
)  # fmt: skip
CONTAINER = table(
    "name image",
    name=NAME, image=TEXT, imagePullPolicy={"enum": ["Always", "IfNotPresent", "Never"]}, command=COMMAND, args=COMMAND,
    workingDir=TEXT, resources=RESOURCES, ports=many(PORT),
    env=many(table("name", name=TEXT, value={"type": "string"}, valueFrom={"type": "object"})),
    volumeMounts=many(table("name mountPath", name=NAME, mountPath=TEXT, subPath=TEXT, readOnly=YES_NO)),
    readinessProbe=PROBE, livenessProbe=PROBE, startupProbe=PROBE, securityContext={"type": "object"},
    lifecycle={"type": "object"},
)  # fmt: skip
VOLUME = table(
    "name",
    name=NAME, emptyDir=table("", medium={"enum": ["", "Memory"]}, sizeLimit=QUANTITY),
    persistentVolumeClaim=table("claimName", claimName=NAME, readOnly=YES_NO), configMap={"type": "object"},
    secret={"type": "object"}, hostPath=table("path", path=TEXT, type=TEXT),
)  # fmt: skip
POD = table(
    "containers",
    containers={**many(CONTAINER), "minItems": 1}, initContainers=many(CONTAINER), volumes=many(VOLUME),
    terminationGracePeriodSeconds=WHOLE, restartPolicy={"enum": ["Always", "OnFailure", "Never"]}, nodeSelector=TEXTS,
    serviceAccountName=NAME, tolerations=many({"type": "object"}), affinity={"type": "object"}, hostNetwork=YES_NO,
    imagePullSecrets=many(table("name", name=NAME)), securityContext={"type": "object"}, priorityClassName=NAME,
)  # fmt: skip
POD_TEMPLATE = table("spec", metadata=METADATA, spec=POD)

HEAD_GROUP = table(
    "template rayStartParams",
    template=POD_TEMPLATE, headService={"type": "object"}, enableIngress=YES_NO, rayStartParams=TEXTS,
    serviceType={"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
)  # fmt: skip
WORKER_GROUP = table(
    "groupName template rayStartParams",
    suspend=YES_NO, groupName=NAME, replicas=WHOLE, minReplicas=WHOLE, maxReplicas=WHOLE, idleTimeoutSeconds=WHOLE,
    rayStartParams=TEXTS, template=POD_TEMPLATE, scaleStrategy={"type": "object"}, numOfHosts=WHOLE,
)  # fmt: skip
CLUSTER = table(
    "headGroupSpec",
    suspend=YES_NO, managedBy=TEXT, autoscalerOptions={"type": "object"}, headServiceAnnotations=TEXTS,
    enableInTreeAutoscaling=YES_NO, gcsFaultToleranceOptions={"type": "object"}, headGroupSpec=HEAD_GROUP,
    rayVersion={"type": "string", "pattern": r"^\d+\.\d+\.\d+$"}, workerGroupSpecs=many(WORKER_GROUP),
)  # fmt: skip
JOB = table(
    "entrypoint",
    activeDeadlineSeconds=WHOLE, backoffLimit=WHOLE, rayClusterSpec=CLUSTER, submitterPodTemplate=POD_TEMPLATE,
    metadata=TEXTS, clusterSelector=TEXTS, submitterConfig={"type": "object"}, managedBy=TEXT,
    deletionStrategy={"type": "object"}, entrypoint=TEXT, runtimeEnvYAML=TEXT, jobId=TEXT,
    submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode"]}, entrypointResources=TEXT,
    entrypointNumCpus={"type": "number"}, entrypointNumGpus={"type": "number"}, ttlSecondsAfterFinished=WHOLE,
    shutdownAfterJobFinishes=YES_NO, suspend=YES_NO, schedule=TEXT,
)  # fmt: skip
CLAIM = table(
    "metadata spec", metadata=METADATA,
    spec=table(
        "accessModes resources",
        accessModes=many({"enum": ["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"]}),
        resources=RESOURCES, storageClassName=NAME, volumeMode={"enum": ["Filesystem", "Block"]},
    ),
)  # fmt: skip
STATEFUL_SET = table(
    "selector serviceName template",
    serviceName=NAME, replicas=WHOLE, selector=table("matchLabels", matchLabels=TEXTS), template=POD_TEMPLATE,
    volumeClaimTemplates=many(CLAIM), podManagementPolicy={"enum": ["OrderedReady", "Parallel"]},
)  # fmt: skip
SERVICE = table(
    "ports",
    selector=TEXTS, type={"enum": ["ClusterIP", "NodePort", "LoadBalancer"]}, clusterIP=TEXT,
    ports=many(table("port", name=NAME, port=WHOLE, targetPort={"type": ["integer", "string"]}, protocol=TEXT)),
)  # fmt: skip

SPECS: dict[tuple[str, str], Schema] = {
    ("ray.io/v1", "RayCluster"): CLUSTER,
    ("ray.io/v1", "RayJob"): JOB,
    ("apps/v1", "StatefulSet"): STATEFUL_SET,
    ("v1", "Service"): SERVICE,
    ("v1", "PersistentVolumeClaim"): CLAIM["properties"]["spec"],
}
"""Schema of `spec` by `apiVersion` and `kind`."""


def manifest_schema(document: dict[str, Any]) -> Schema:
    """The schema of a whole manifest.

    Raises:
        KeyError: it is of a kind that is not known here.
    """
    spec = SPECS[document["apiVersion"], document["kind"]]
    return table("apiVersion kind metadata spec", apiVersion=TEXT, kind=TEXT, metadata=METADATA, spec=spec)
