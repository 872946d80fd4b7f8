{{/* Names, labels, images: what every template says the same way. */}}

{{- define "prefixfleet.name" -}}
{{- default .Release.Name .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "prefixfleet.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (ternary (include "prefixfleet.name" .) "default" .Values.serviceAccount.create) -}}
{{- end -}}

{{/* Labels of one component, for selectors: (list $ "router") */}}
{{- define "prefixfleet.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: prefixfleet
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "prefixfleet.labels" -}}
{{- $root := index . 0 -}}
{{ include "prefixfleet.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ $root.Chart.Name }}-{{ $root.Chart.Version }}
{{- with $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* metadata of an object: (list $ "router" "name") */}}
{{- define "prefixfleet.metadata" -}}
name: {{ index . 2 }}
namespace: {{ (index . 0).Release.Namespace }}
labels:
  {{- include "prefixfleet.labels" . | nindent 2 }}
{{- end -}}

{{/* image and pull policy of one component: (list $ "router") */}}
{{- define "prefixfleet.image" -}}
{{- $root := index . 0 -}}
{{- $image := index $root.Values.image (index . 1) -}}
{{- if ne (index . 1) "redis" -}}
{{- $image = printf "%s:%s" $image ($root.Values.image.tag | default $root.Chart.AppVersion) -}}
{{- end -}}
image: {{ list $root.Values.image.registry $image | compact | join "/" }}
imagePullPolicy: {{ $root.Values.image.pullPolicy }}
{{- end -}}
