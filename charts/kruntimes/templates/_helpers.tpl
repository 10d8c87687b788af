{{/* Labels of every object. $ = root, .component may be absent. */}}
{{- define "kruntimes.labels" -}}
{{ include "kruntimes.selector" . }}
app.kubernetes.io/part-of: kruntimes
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{/* What selectors match. Immutable in a Deployment, so nothing that an upgrade changes may stand here. */}}
{{- define "kruntimes.selector" -}}
app.kubernetes.io/name: {{ .name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- end }}

{{/* An image: as given, or the default under the registry. */}}
{{- define "kruntimes.image" -}}
{{- if .image -}}
{{ .image }}
{{- else -}}
{{ with .root.Values.images.registry }}{{ trimSuffix "/" . }}/{{ end }}kruntimes/{{ .name }}:{{ .root.Chart.AppVersion }}
{{- end -}}
{{- end }}

{{- define "kruntimes.gateway.tlsSecret" -}}
{{ .Values.gateway.tls.existingSecret | default "kruntimes-gateway-tls" }}
{{- end }}

{{- define "kruntimes.gateway.url" -}}
{{ .Values.gateway.url | default (printf "https://kruntimes-gateway.%s.svc.cluster.local" .Release.Namespace) }}
{{- end }}

{{/* The restricted Pod Security Standard. */}}
{{- define "kruntimes.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "kruntimes.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "kruntimes.probes" -}}
startupProbe:
  httpGet: {path: /livez, port: admin}
  periodSeconds: 1
  failureThreshold: 60
livenessProbe:
  httpGet: {path: /livez, port: admin}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /readyz, port: admin}
  periodSeconds: 2
  timeoutSeconds: 2
{{- end }}

{{/* Where Pods go. */}}
{{- define "kruntimes.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .topologySpreadConstraints }}
topologySpreadConstraints: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{- define "kruntimes.pullSecrets" -}}
{{- with .Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{/*
Environment: .own and the logs' settings, then .extra. Not flags, so that extraArgs can say otherwise for one component.
A name stands once: server-side apply refuses two.
*/}}
{{- define "kruntimes.env" -}}
{{- $own := list (dict "name" "KRUNTIMES_LOG_FORMAT" "value" .root.Values.log.format) (dict "name" "KRUNTIMES_LOG_FILTER" "value" .root.Values.log.filter) }}
{{- $given := list }}
{{- range .extra }}{{ $given = append $given .name }}{{ end }}
{{- $env := list }}
{{- range concat $own .own }}{{ if not (has .name $given) }}{{ $env = append $env . }}{{ end }}{{ end }}
{{- toYaml (concat $env .extra) }}
{{- end }}

{{/* OpenTelemetry's variables, as a list; empty without a collector. */}}
{{- define "kruntimes.otel" -}}
{{- $env := list }}
{{- with .Values.tracing }}
{{- if .otlpEndpoint }}
{{- $env = append $env (dict "name" "OTEL_EXPORTER_OTLP_ENDPOINT" "value" .otlpEndpoint) }}
{{- $env = append $env (dict "name" "OTEL_TRACES_SAMPLER" "value" .sampler) }}
{{- with .samplerArg }}{{ $env = append $env (dict "name" "OTEL_TRACES_SAMPLER_ARG" "value" .) }}{{ end }}
{{- end }}
{{- end }}
{{- toYaml $env }}
{{- end }}

{{/* A PodDisruptionBudget for the Pods of .name. */}}
{{- define "kruntimes.podDisruptionBudget" -}}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .name }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{- include "kruntimes.labels" . | nindent 4 }}
spec:
  maxUnavailable: {{ .budget.maxUnavailable }}
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels: {{- include "kruntimes.selector" . | nindent 6 }}
{{- end }}

{{- define "kruntimes.role" -}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ .prefix }}Role
metadata:
  name: {{ .name }}
  {{- with .namespace }}
  namespace: {{ . }}
  {{- end }}
  labels: {{- include "kruntimes.labels" (dict "root" .root "name" .account) | nindent 4 }}
rules: {{- .rules | nindent 2 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ .prefix }}RoleBinding
metadata:
  name: {{ .name }}
  {{- with .namespace }}
  namespace: {{ . }}
  {{- end }}
  labels: {{- include "kruntimes.labels" (dict "root" .root "name" .account) | nindent 4 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: {{ .prefix }}Role
  name: {{ .name }}
subjects:
  - kind: ServiceAccount
    name: {{ .account }}
    namespace: {{ .root.Release.Namespace }}
{{- end }}

{{/* Grants .rules to ServiceAccount .name: everywhere, or by a Role in each namespace of the scope. */}}
{{- define "kruntimes.grant" -}}
{{- if .root.Values.scope.namespaces }}
{{- range .root.Values.scope.namespaces }}
{{ include "kruntimes.role" (dict "root" $.root "prefix" "" "name" $.name "account" $.name "rules" $.rules "namespace" .) }}
{{- end }}
{{- else }}
{{ include "kruntimes.role" (dict "root" .root "prefix" "Cluster" "name" .name "account" .name "rules" .rules) }}
{{- end }}
{{- end }}
