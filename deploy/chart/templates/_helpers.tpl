{{- define "podfabric.labels" -}}
app.kubernetes.io/name: podfabric
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* Labels that an upgrade does not change, because a DaemonSet's selector cannot change. */}}
{{- define "podfabric.selector" -}}
app.kubernetes.io/name: podfabric
app.kubernetes.io/component: agent
{{- end }}

{{- define "podfabric.image" -}}
{{- $image := .Values.image }}
{{- if not $image.repository }}
{{- fail "image.repository is empty: podfabric's image is in no public registry: push it to yours with `make image PUSH=registry.example/podfabric`, then add --set image.repository=registry.example/podfabric" }}
{{- end }}
{{- if contains "@" $image.repository }}
{{- fail (printf "image.repository is %q: write the part before @ there, and the part behind it, sha256:..., as image.digest" $image.repository) }}
{{- end }}
{{- $image.repository }}{{ if $image.digest }}@{{ $image.digest }}{{ else }}:{{ $image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}

{{- define "podfabric.pull-secrets" -}}
{{ concat .Values.imagePullSecrets (dig "imagePullSecrets" list (.Values.global | default dict)) | toYaml }}
{{- end }}

{{- /* Values that the schema would refuse by a pattern, without a remedy in its message. */}}
{{- define "podfabric.checks" -}}
{{- range $part := list "pools" "gpus" }}
{{- range $i, $pool := index $.Values.config $part }}
{{- if and $pool.name (not (regexMatch "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$" $pool.name)) }}
{{- fail (printf "config.%s[%d].name is %q: write domain/name, such as \"rdma/hca\"" $part $i $pool.name) }}
{{- end }}
{{- end }}
{{- end }}
{{- range $key := list "cniBinDir" "cniConfDir" "kubeletDir" }}
{{- if not (regexMatch "^/[^\\s:]*[^/\\s:]$" (index $.Values.host $key)) }}
{{- fail (printf "host.%s is %q: write an absolute path, such as /opt/cni/bin" $key (index $.Values.host $key)) }}
{{- end }}
{{- end }}
{{- if not (regexMatch "^(127(\\.[0-9]{1,3}){3}|\\[::1\\]):[1-9][0-9]{0,4}$" (include "podfabric.listen" .)) }}
{{- fail (printf "config.agent.listen is %q: write a loopback address with a port, such as 127.0.0.1:9810" (include "podfabric.listen" .)) }}
{{- end }}
{{- $resources := dict "resources" .Values.resources "controller.resources" .Values.controller.resources "metrics.proxy.resources" .Values.metrics.proxy.resources }}
{{- range $place, $both := $resources }}
{{- range $kind, $quantities := $both }}
{{- range $name, $quantity := $quantities }}
{{- $form := ternary "^[0-9]+(\\.[0-9]+)?([kMGTPE]|[KMGTPE]i)$" "^[0-9]+(\\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?$" (eq $name "memory") }}
{{- if not (regexMatch $form (toString $quantity)) }}
{{- fail (printf "%s.%s.%s is %v: write a quantity, such as %s" $place $kind $name $quantity (ternary "512Mi" "50m" (eq $name "memory"))) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- /* "true" if the agents use the API server: they lease addresses from it, read policies, or
write events on pods with limits of GPUs. */}}
{{- define "podfabric.asks-api" -}}
{{- if or (include "podfabric.reads-api" .) (include "podfabric.limits-gpus" .) }}true{{ end }}
{{- end }}

{{- define "podfabric.reads-api" -}}
{{- if or (eq .Values.ipam.scope "cluster") .Values.policy.enabled }}true{{ end }}
{{- end }}

{{- define "podfabric.listen" -}}
{{ dig "agent" "listen" "127.0.0.1:9810" .Values.config }}
{{- end }}

{{- /* "true" if a pool of GPUs has limits, which the agent enforces: any mode except replicas. */}}
{{- define "podfabric.limits-gpus" -}}
{{- range .Values.config.gpus }}{{ if ne (default "slices" .mode) "replicas" }}true{{ break }}{{ end }}{{ end }}
{{- end }}

{{- /* The RuntimeClass that lets the agent open the GPUs' device nodes. */}}
{{- define "podfabric.gpu-runtime" -}}
{{- if include "podfabric.limits-gpus" . }}{{ (.Values.gpu | default dict).runtimeClassName | default "" }}{{ end }}
{{- end }}

{{- define "podfabric.driver-root" -}}
{{ dig "gpuLimits" "driverRoot" "/" .Values.config }}
{{- end }}

{{- /* docs/operate/security.md gives the purpose of each. */}}
{{- define "podfabric.capabilities" -}}
[SYS_ADMIN, NET_ADMIN, NET_RAW, SYS_PTRACE, DAC_READ_SEARCH{{ if include "podfabric.limits-gpus" . }}, SYS_CHROOT, KILL{{ end }}]
{{- end }}

{{- /* Objects that `helm uninstall` leaves behind, as a hook: `helm install` takes them over. */}}
{{- define "podfabric.left-behind" -}}
helm.sh/hook: post-delete
helm.sh/hook-weight: {{ . | quote }}
{{- end }}

{{- /* The part `ipam` of the nodes' config.yaml. */}}
{{- define "podfabric.ipam" -}}
{{- $ipam := omit .Values.ipam "whereabouts" -}}
{{- if not .Values.ipam.nv_ipam -}}
{{- $ipam = omit $ipam "nv_ipam" "nv_ipam_namespace" -}}
{{- end -}}
{{ toYaml $ipam }}
{{- end }}

{{- /* The settings that agents read only at their start (AT_START_ONLY of agent/settings.py and
agent/gpu_limits.py): a change replaces the agents. */}}
{{- define "podfabric.at-start" -}}
{{- $agent := pick (.Values.config.agent | default dict) "listen" "sweep" -}}
{{- $gpus := .Values.config.gpuLimits | default dict -}}
{{ printf "%s\n%s\n%s" (include "podfabric.ipam" .) (toYaml $agent) (toYaml $gpus) | sha256sum | trunc 16 }}
{{- end }}

{{- define "podfabric.service-account" -}}
{{- $root := .root -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: podfabric
  namespace: {{ $root.Release.Namespace }}
  labels: {{- include "podfabric.labels" $root | nindent 4 }}
{{- if .left }}
  annotations:
    {{- include "podfabric.left-behind" "-1" | nindent 4 }}
    meta.helm.sh/release-name: {{ $root.Release.Name }}
    meta.helm.sh/release-namespace: {{ $root.Release.Namespace }}
{{- end }}
# The agent's pod mounts a token if it needs one, for addresses of the cluster and policies.
automountServiceAccountToken: false
{{- end }}

{{- /* An uninstall leaves these objects: without them running pods would lose their addresses. */}}
{{- define "podfabric.keep" -}}
helm.sh/resource-policy: keep
{{- end }}
