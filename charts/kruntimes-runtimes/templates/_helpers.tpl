{{/* An image: as given, or that of a language under the registry. */}}
{{- define "kruntimes-runtimes.image" -}}
{{- if .image -}}
{{ .image }}
{{- else -}}
{{ with .root.Values.images.registry }}{{ trimSuffix "/" . }}/{{ end }}kruntimes/runtime-{{ .name }}:{{ .root.Chart.AppVersion }}
{{- end -}}
{{- end }}
