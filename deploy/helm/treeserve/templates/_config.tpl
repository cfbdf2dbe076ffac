{{/* A role's configuration file: list (root, role). Keys are the fields of its configuration dataclass. */}}
{{- define "treeserve.config" -}}
{{- $root := index . 0 -}}
{{- $role := index . 1 -}}
{{- $values := $root.Values -}}
{{- $roles := include "treeserve.roles" $root | fromYaml -}}
{{- $ports := (index $roles $role).ports -}}
model_folder: {{ $values.model.path | quote }}
model_name: {{ $values.model.name | quote }}
listen: "0.0.0.0:{{ $ports.grpc }}"
{{- if eq $role "router" }}
http_listen: "0.0.0.0:{{ $ports.http }}"
{{- else }}
metrics_listen: "0.0.0.0:{{ $ports.metrics }}"
{{- end }}
{{- if ne $role "verifier" }}
# Every address behind the headless Service, looked up again from time to time.
verifiers: ["dns://{{ include "treeserve.fullname" $root }}-verifier.{{ $root.Release.Namespace }}.svc:{{ $roles.verifier.ports.grpc }}"]
{{- else if $values.verifier.gpu.count }}
device: cuda
{{- end }}
{{- if ne $role "speculator" }}
drain_s: {{ $values.drain.seconds }}
{{- end }}
log_level: {{ $values.logLevel }}
{{- with $values.otlpEndpoint }}
otlp_endpoint: {{ . | quote }}
{{- end }}
{{- range $key, $value := (index $values $role).config }}
{{ $key }}: {{ $value | toJson }}
{{- end }}
{{- end }}
