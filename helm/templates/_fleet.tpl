{{/* Pods of the fleet: one head, and groups of nodes. KubeRay and plain StatefulSets use the same
templates; only the latter say themselves how Ray starts. */}}

{{- define "prefixfleet.rayEnv" -}}
{{ include "prefixfleet.fleetEnv" . }}
- name: RAY_USAGE_STATS_ENABLED
  value: "0"
{{- if eq .Values.fleet.kind "StatefulSet" }}{{/* KubeRay adds it to Ray's own containers */}}
{{ include "prefixfleet.rayToken" . }}
{{- if .Values.fleet.headRestart.enabled }}
- name: RAY_gcs_rpc_server_reconnect_timeout_s{{/* nodes wait this long for a head */}}
  value: "600"
{{- end }}
{{- end }}
{{- end -}}

{{- define "prefixfleet.headEnv" -}}
{{ include "prefixfleet.rayEnv" . }}
{{- if and .Values.fleet.headRestart.enabled (eq .Values.fleet.kind "StatefulSet") }}
- name: RAY_REDIS_ADDRESS
  value: {{ include "prefixfleet.rayRedis" . }}
- name: RAY_REDIS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ .Values.secretName }}, key: redis-password}}
- name: RAY_external_storage_namespace
  value: {{ .Values.fleetName }}
{{- end }}
{{- end -}}

{{- define "prefixfleet.keeperEnv" -}}
{{ include "prefixfleet.fleetEnv" . }}
{{ include "prefixfleet.rayToken" . }}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: RAY_ADDRESS
  value: $(POD_IP):6379
{{- end -}}

{{- define "prefixfleet.rayToken" -}}
- name: RAY_AUTH_MODE
  value: token
- name: RAY_AUTH_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .Values.secretName }}, key: auth_token}}
{{- end -}}

{{/* rayStartParams of the head, of a group; Ray's object store carries no KV blocks */}}
{{- define "prefixfleet.headParams" -}}
num-cpus: "0"
num-gpus: "0"
dashboard-host: 0.0.0.0
object-store-memory: "268435456"
{{- end -}}

{{- define "prefixfleet.groupParams" -}}
num-cpus: {{ .cpus | quote }}
num-gpus: {{ .gpus | default 0 | quote }}
object-store-memory: "268435456"
resources: {{ printf "'{\"prefixfleet_engines\": %d}'" (int (include "prefixfleet.engines" .)) | quote }}
{{- end -}}

{{/* how many engines a group's pod has: one for so many GPUs as it has ranks */}}
{{- define "prefixfleet.engines" -}}
{{- $ranks := int ((.workerSettings | default dict).tensor_parallel | default 1) -}}
{{- $gpus := int (.gpus | default 0) -}}
{{- $engines := int (.engines | default (max 1 (div $gpus $ranks))) -}}
{{- if and (gt $ranks 1) $gpus (ne (mul $engines $ranks) $gpus) -}}
{{- fail (printf "group %s: %d engines of %d ranks (workerSettings.tensor_parallel) take %d GPUs, its pod has %d; set engines, gpus or tensor_parallel" .name $engines $ranks (mul $engines $ranks) $gpus) -}}
{{- end -}}
{{- $engines -}}
{{- end -}}

{{/* the same as arguments of `ray start` */}}
{{- define "prefixfleet.rayArguments" -}}
{{- range $name, $value := . }} --{{ $name }}={{ $value }}{{ end -}}
{{- end -}}

{{- define "prefixfleet.headContainer" -}}
- name: ray
  {{- include "prefixfleet.image" (list .root "worker") | nindent 2 }}
  {{- with .command }}
  command: [bash, -euc]
  args: [{{ . | quote }}]
  {{- end }}
  ports:
    - {name: gcs-server, containerPort: 6379}
    - {name: dashboard, containerPort: 8265}
    - {name: client, containerPort: 10001}
  resources:
    requests: {cpu: {{ .values.cpus }}, memory: {{ .values.memoryGiB }}Gi}
    limits: {memory: {{ .values.memoryGiB }}Gi}
  {{- include "prefixfleet.container" . | nindent 2 }}
# starts what is missing on the nodes that are there; shares processes, /tmp and /dev/shm with Ray,
# since a driver looks for the raylet of its machine there
- name: keeper
  {{- include "prefixfleet.image" (list .root "worker") | nindent 2 }}
  command: [bash, -euc]
  args:
    - until ray health-check --address=$RAY_ADDRESS >/dev/null 2>&1; do sleep 2; done;
      exec python3 -m prefixfleet.cluster.keeper run
  resources:
    requests: {cpu: 100m, memory: 512Mi}
    limits: {memory: 1Gi}
  {{- include "prefixfleet.container" (merge (dict "env" (include "prefixfleet.keeperEnv" .root)) .) | nindent 2 }}
{{- end -}}

{{- define "prefixfleet.groupContainer" -}}
{{- $group := .values -}}
{{- $rdma := $group.rdma | default dict -}}
{{- $memory := printf "%dGi" (add (int $group.memoryGiB) (int $group.dramGiB) 2) -}}
{{- $devices := dict -}}
{{- if $rdma.enabled -}}{{- $devices = deepCopy ($rdma.resources | default dict) -}}{{- end -}}
{{- if $group.gpus -}}
{{- $_ := set $devices ($group.gpuResource | default "nvidia.com/gpu") $group.gpus -}}
{{- end -}}
- name: ray
  {{- include "prefixfleet.image" (list .root "worker") | nindent 2 }}
  {{- with .command }}
  command: [bash, -euc]
  args: [{{ . | quote }}]
  {{- end }}
  ports:
    - {name: node-http, containerPort: 8100}
  lifecycle:
    # the rest of the grace is for the engines to end
    preStop:
      exec:
        command: [bash, -c, prefixfleet drain $POD_IP --wait {{ max 1 (sub (int ($group.stopSeconds | default 60)) 20) }}]
  resources:
    {{- $requests := merge (dict "cpu" $group.cpus "memory" $memory) $devices }}
    {{- $limits := merge (dict "memory" $memory) $devices }}
    {{- toYaml (dict "requests" $requests "limits" $limits) | nindent 4 }}
  {{- include "prefixfleet.container" . | nindent 2 }}
{{- end -}}

{{/* Refuses to start where the RDMA card could not pin memory, with the reason, instead of a slow
or failing link later. */}}
{{- define "prefixfleet.checkMemlock" -}}
- name: check-memlock
  {{- include "prefixfleet.image" (list .root "worker") | nindent 2 }}
  command:
    - bash
    - -euc
    - |
      capabilities=$(sed -n 's/^CapEff:\t*//p' /proc/self/status)
      if [ "$(ulimit -l)" != unlimited ] && (( !(0x$capabilities >> 14 & 1) )); then
        echo "rdma: memory cannot be locked (ulimit -l is $(ulimit -l) KiB and IPC_LOCK is not" \
          "effective): set LimitMEMLOCK=infinity for the container runtime, or let the pod run as" \
          "root (podSecurityContext.runAsUser: 0, runAsNonRoot: false)" >&2
        exit 1
      fi
  {{- include "prefixfleet.container" . | nindent 2 }}
{{- end -}}

{{- define "prefixfleet.groupVolumes" -}}
{{ include "prefixfleet.fleetVolumes" .root }}
- name: home
  emptyDir: {}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ add (int .values.dramGiB) 2 }}Gi}
{{- with .values.ssd }}
{{- if and .sizeGiB (not (and .storageClassName (eq $.root.Values.fleet.kind "StatefulSet"))) }}
- name: ssd
  {{- if .hostPath }}
  hostPath: {path: {{ .hostPath }}, type: Directory}
  {{- else if .storageClassName }}
  ephemeral:
    volumeClaimTemplate:
      spec:
        {{- include "prefixfleet.ssdClaim" . | nindent 8 }}
  {{- else }}
  emptyDir: {sizeLimit: {{ .sizeGiB }}Gi}
  {{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "prefixfleet.ssdClaim" -}}
accessModes: [ReadWriteOnce]
storageClassName: {{ .storageClassName }}
resources: {requests: {storage: {{ .sizeGiB }}Gi}}
{{- end -}}

{{/* (dict "root" $ "command" "ray start ..." or "") */}}
{{- define "prefixfleet.headPod" -}}
{{- $root := .root -}}
{{- $pod := dict "root" $root "component" "head" "values" $root.Values.fleet.head "grace" 60 "command" .command -}}
{{- $_ := set $pod "token" (eq (include "prefixfleet.scales" $root) "true") -}}
{{- $_ := set $pod "shareProcesses" true -}}
{{- $_ := set $pod "env" (include "prefixfleet.headEnv" $root) -}}
{{- $_ := set $pod "mounts" (printf "%s\n- {name: shm, mountPath: /dev/shm}\n- {name: home, mountPath: /home/prefixfleet}" (include "prefixfleet.fleetMounts" $root)) -}}
{{- $_ := set $pod "volumes" (printf "%s\n- name: shm\n  emptyDir: {medium: Memory, sizeLimit: 1Gi}\n- name: home\n  emptyDir: {}" (include "prefixfleet.fleetVolumes" $root)) -}}
{{- $_ := set $pod "containers" (include "prefixfleet.headContainer" $pod) -}}
{{- include "prefixfleet.podTemplate" $pod -}}
{{- end -}}

{{/* (dict "root" $ "group" group "command" "ray start ..." or "") */}}
{{- define "prefixfleet.groupPod" -}}
{{- $root := .root -}}
{{- $group := .group -}}
{{- $rdma := ($group.rdma | default dict) -}}
{{- $pod := dict "root" $root "component" (printf "node-%s" $group.name) "values" $group "grace" ($group.stopSeconds | default 60) "command" .command -}}
{{- $_ := set $pod "lockMemory" ($rdma.enabled | default false) -}}
{{- $_ := set $pod "hostNetwork" (and $rdma.enabled (dig "hostNetwork" true $rdma)) -}}
{{- $node := dict "pool_bytes" (mul (int $group.dramGiB) 1073741824 | toString) "port" 8100 "runtime_dir" "/tmp/prefixfleet" -}}
{{- $worker := dict "model" $group.model -}}
{{- with $group.servedName -}}{{- $_ := set $worker "served_name" . -}}{{- end -}}
{{- $env := list (include "prefixfleet.rayEnv" $root) "\n- name: POD_IP\n  valueFrom: {fieldRef: {fieldPath: status.podIP}}" -}}
{{- $env = append $env (include "prefixfleet.settings" (list "NODE" (merge (dict) ($group.nodeSettings | default dict) $node))) -}}
{{- $env = append $env (include "prefixfleet.settings" (list "WORKER" (merge (dict) ($group.workerSettings | default dict) $worker))) -}}
{{- $_ := set $pod "env" (join "" $env) -}}
{{- $mounts := printf "%s\n- {name: shm, mountPath: /dev/shm}\n- {name: home, mountPath: /home/prefixfleet}" (include "prefixfleet.fleetMounts" $root) -}}
{{- if dig "ssd" "sizeGiB" 0 $group -}}
{{- $mounts = printf "%s\n- {name: ssd, mountPath: /var/lib/prefixfleet}" $mounts -}}
{{- end -}}
{{- $_ := set $pod "mounts" $mounts -}}
{{- $_ := set $pod "volumes" (include "prefixfleet.groupVolumes" $pod) -}}
{{- if $rdma.enabled -}}
{{- $_ := set $pod "initContainers" (include "prefixfleet.checkMemlock" $pod) -}}
{{- end -}}
{{- $_ := set $pod "containers" (include "prefixfleet.groupContainer" $pod) -}}
{{- include "prefixfleet.podTemplate" $pod -}}
{{- end -}}

{{/* "true" if some group may grow: Ray's autoscaler is needed */}}
{{- define "prefixfleet.scales" -}}
{{- $scales := false -}}
{{- range .Values.fleet.groups -}}
{{- if gt (int (.maxReplicas | default .replicas)) (int .replicas) -}}{{- $scales = true -}}{{- end -}}
{{- end -}}
{{- and $scales (eq .Values.fleet.kind "RayCluster") -}}
{{- end -}}

{{/* host:port of the Redis that keeps Ray's state */}}
{{- define "prefixfleet.rayRedis" -}}
{{- if .Values.redis.bundled -}}
{{ include "prefixfleet.name" . }}-ray-redis:6379
{{- else -}}
{{ required "fleet.headRestart.redisAddress: expected host:port of a Redis for Ray's state, since redis.bundled is false (not the one of the index: that one may lose entries)" .Values.fleet.headRestart.redisAddress }}
{{- end -}}
{{- end -}}
