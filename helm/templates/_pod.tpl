{{/*
One pod template for every component, so that security, scheduling and the escape hatches are the
same everywhere. (dict "root" $ "component" "router" "values" .Values.router "grace" 45
"containers" YAML "volumes" YAML), optionally "initContainers" YAML, "hostNetwork", "token" (mounts
the service account's token) and "shareProcesses".
*/}}
{{- define "prefixfleet.podTemplate" -}}
{{- $root := .root -}}
metadata:
  labels:
    {{- include "prefixfleet.selector" (list $root .component) | nindent 4 }}
    {{- with merge (dict) (.values.podLabels | default dict) $root.Values.commonLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with .values.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "prefixfleet.serviceAccount" $root }}
  automountServiceAccountToken: {{ .token | default false }}
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ .grace }}
  {{- if .shareProcesses }}
  shareProcessNamespace: true
  {{- end }}
  {{- if .hostNetwork }}
  hostNetwork: true
  hostIPC: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- toYaml $root.Values.podSecurityContext | nindent 4 }}
  {{- with pick .values "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "priorityClassName" "schedulerName" "runtimeClassName" }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- if or .initContainers .values.initContainers }}
  initContainers:
    {{- with .initContainers }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- with .values.initContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
  containers:
    {{- .containers | nindent 4 }}
    {{- with .values.sidecars }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    - name: tmp
      emptyDir: {}
    {{- with .volumes }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- with .values.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* What every container of a component ends with: env, mounts, security. Same arguments, and
"env", "mounts" YAML; "lockMemory" allows locked memory. */}}
{{- define "prefixfleet.container" -}}
env:
  {{- .env | nindent 2 }}
  {{- with .values.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .values.envFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
volumeMounts:
  - {name: tmp, mountPath: /tmp}
  {{- with .mounts }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- with .values.volumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- $security := deepCopy .root.Values.securityContext -}}
{{- if .lockMemory -}}
{{- $security = merge (dict "capabilities" (dict "add" (list "IPC_LOCK"))) $security -}}
{{- end }}
securityContext:
  {{- toYaml $security | nindent 2 }}
{{- end -}}

{{/* Environment that every process of the fleet agrees on; secrets by reference only. */}}
{{- define "prefixfleet.fleetEnv" -}}
- name: PREFIXFLEET_FLEET
  value: {{ .Values.fleetName }}
- name: PREFIXFLEET_SECRET_FILE
  value: /etc/prefixfleet/cluster-secret
{{- if .Values.redis.bundled }}
- name: REDIS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ .Values.secretName }}, key: redis-password}}
- name: PREFIXFLEET_REDIS_URL
  value: redis://:$(REDIS_PASSWORD)@{{ include "prefixfleet.name" . }}-redis:6379/0
{{- else }}
- name: PREFIXFLEET_REDIS_URL
  valueFrom: {secretKeyRef: {name: {{ .Values.secretName }}, key: redis-url}}
{{- end }}
{{- end -}}

{{/* Settings of one section: (list "ROUTER" .Values.router.settings) */}}
{{- define "prefixfleet.settings" -}}
{{- $section := index . 0 -}}
{{- range $name, $value := index . 1 }}
- name: PREFIXFLEET_{{ $section }}_{{ upper $name }}
  value: {{ $value | toJson | trimAll "\"" | quote }}
{{- end }}
{{- end -}}

{{/* Mounts and volumes that every process of the fleet has: the secret, a CA, the models. */}}
{{- define "prefixfleet.fleetMounts" -}}
- {name: secret, mountPath: /etc/prefixfleet, readOnly: true}
{{- if .Values.redis.caSecret }}
- {name: redis-ca, mountPath: /etc/prefixfleet-redis-ca, readOnly: true}
{{- end }}
{{- range .Values.fleet.modelVolumes }}
- {name: {{ .name }}, mountPath: {{ .mountPath }}, readOnly: true}
{{- end }}
{{- end -}}

{{- define "prefixfleet.fleetVolumes" -}}
- name: secret
  secret:
    secretName: {{ .Values.secretName }}
    defaultMode: 0440
    items: [{key: cluster-secret, path: cluster-secret}]
{{- with .Values.redis.caSecret }}
- name: redis-ca
  secret:
    secretName: {{ .name }}
    items: [{key: {{ .key }}, path: ca.crt}]
{{- end }}
{{- range .Values.fleet.modelVolumes }}
- name: {{ .name }}
  {{- toYaml .volume | nindent 2 }}
{{- end }}
{{- end -}}
