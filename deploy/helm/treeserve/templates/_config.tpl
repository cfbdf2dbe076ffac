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
{{- with $ports.http }}
http_listen: "0.0.0.0:{{ . }}"
{{- end }}
{{- with $ports.metrics }}
metrics_listen: "0.0.0.0:{{ . }}"
{{- end }}
{{- with $ports.health }}
health_listen: "0.0.0.0:{{ . }}"
{{- end }}
{{- if $values.tls.secretName }}
tls:
  cert_file: /etc/treeserve-tls/tls.crt
  key_file: /etc/treeserve-tls/tls.key
  ca_file: /etc/treeserve-tls/ca.crt
  # Verifiers are called by the addresses of their pods, which no certificate knows.
  peer_name: {{ include "treeserve.fullname" $root }}-verifier.{{ $root.Release.Namespace }}.svc
{{- end }}
{{- if and (eq $role "router") $values.auth.keysSecretName }}
api_keys_file: /etc/treeserve-api-keys/keys.yaml
{{- end }}
{{- if and (ne $role "verifier") (eq $values.discovery "kubernetes") }}
# Every ready pod behind the headless Service, known as soon as the Kubernetes API knows it.
verifiers: ["kubernetes://{{ $root.Release.Namespace }}/{{ include "treeserve.fullname" $root }}-verifier:{{ $roles.verifier.ports.grpc }}"]
{{- else if ne $role "verifier" }}
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
