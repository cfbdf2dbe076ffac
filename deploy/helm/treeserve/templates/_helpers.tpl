{{/* Names, labels and the pieces that every pod shares. Called with the root context, or with a list (root, role). */}}

{{/* Not empty if callers have to prove who they are: then probes, KEDA and Prometheus get ports where nobody asks them. */}}
{{- define "treeserve.secured" -}}
{{- if or .Values.tls.secretName .Values.auth.keysSecretName }}secured{{ end }}
{{- end }}

{{/* What differs between the roles. Probes ask the port `health`, or `grpc` without one; `scrape` names that of /metrics.
startupSeconds is how long a pod may take until it serves; a verifier loads a model in that time. */}}
{{- define "treeserve.roles" -}}
{{- $secured := include "treeserve.secured" . }}
router:
  image: router
  ports: { grpc: 50051, http: 8000{{ if $secured }}, health: 50050, metrics: 9101{{ end }} }
  scrape: {{ if $secured }}metrics{{ else }}http{{ end }}
  startupSeconds: 120
  # New before old: a router is cheap and clients see every gap.
  rollingUpdate: { maxSurge: 1, maxUnavailable: 0 }
verifier:
  image: engine
  ports: { grpc: 50052, metrics: 9102{{ if $secured }}, health: 50050{{ end }} }
  scrape: metrics
  startupSeconds: 600
  # Old before new: there is seldom a spare accelerator.
  rollingUpdate: { maxSurge: 0, maxUnavailable: 1 }
speculator:
  image: engine
  ports: { grpc: 50053, metrics: 9103{{ if $secured }}, health: 50050{{ end }} }
  scrape: metrics
  startupSeconds: 300
  # A missing speculator costs speed only.
  rollingUpdate: { maxSurge: 0, maxUnavailable: 1 }
{{- end }}

{{- define "treeserve.fullname" -}}
{{- $name := .Release.Name | contains .Chart.Name | ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name) -}}
{{- $name | trunc 50 | trimSuffix "-" -}}
{{- end }}

{{- define "treeserve.selector" -}}
app.kubernetes.io/name: {{ (index . 0).Chart.Name }}
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "treeserve.labels" -}}
{{ include "treeserve.selector" . }}
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
helm.sh/chart: {{ printf "%s-%s" (index . 0).Chart.Name (index . 0).Chart.Version }}
{{- end }}

{{/* The image of a repository's name: list (root, "router" or "engine"). */}}
{{- define "treeserve.image" -}}
{{- $root := index . 0 -}}
{{ printf "%s:%s" (index $root.Values.image (index . 1)) ($root.Values.image.tag | default $root.Chart.AppVersion) | quote }}
{{- end }}

{{/* Not empty if the pods of a role ask the Kubernetes API where verifiers are: list (root, role). */}}
{{- define "treeserve.asksApi" -}}
{{- if and (eq (index . 0).Values.discovery "kubernetes") (has (index . 1) (list "router" "speculator")) }}{{ index . 1 }}{{ end }}
{{- end }}

{{/* Pod fields of the restricted security standard, and what keeps pods independent of their surroundings: list (root,
role). */}}
{{- define "treeserve.podDefaults" -}}
serviceAccountName: {{ include "treeserve.fullname" (index . 0) }}
automountServiceAccountToken: {{ include "treeserve.asksApi" . | empty | not }}
# Variables of a Service called treeserve-... would read as settings: TREESERVE_ROUTER_PORT=tcp://...
enableServiceLinks: false
{{- with (index . 0).Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  fsGroup: 65532
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- end }}

{{- define "treeserve.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* The port of a URL such as redis://host:6379/0: list (url, default port). */}}
{{- define "treeserve.urlPort" -}}
{{- (index . 0 | urlParse).host | regexFind ":[0-9]+$" | trimPrefix ":" | default (index . 1 | toString) -}}
{{- end }}

{{/* How fast an autoscaler may go. */}}
{{- define "treeserve.scalingBehavior" -}}
# Slowly down: a new verifier takes minutes to load its model.
scaleDown:
  stabilizationWindowSeconds: 300
  policies: [{ type: Pods, value: 1, periodSeconds: 60 }]
{{- end }}

{{/* Name of the router's port where KEDA asks: it brings no API key, so that of the probes where they have one. */}}
{{- define "treeserve.scalerPort" -}}
{{- $ports := (include "treeserve.roles" . | fromYaml).router.ports -}}
{{- hasKey $ports "health" | ternary "health" "grpc" -}}
{{- end }}

{{- define "treeserve.scalerAddress" -}}
{{- $port := index (include "treeserve.roles" . | fromYaml).router.ports (include "treeserve.scalerPort" .) -}}
{{ include "treeserve.fullname" . }}-router.{{ .Release.Namespace }}.svc:{{ $port }}
{{- end }}

{{/* Not empty if KEDA scales any role. */}}
{{- define "treeserve.asksKeda" -}}
{{- range $role := keys (include "treeserve.roles" . | fromYaml) }}
{{- $scaling := (index $.Values $role).autoscaling }}
{{- if and $scaling.enabled $scaling.keda.enabled }}{{ $role }}{{ end }}
{{- end }}
{{- end }}
