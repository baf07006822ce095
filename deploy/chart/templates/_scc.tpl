{{- /* OpenShift's permission for the agent's pod: exactly the rights of its pod template. */}}
{{- define "podfabric.scc" -}}
{{- $root := .root -}}
apiVersion: security.openshift.io/v1
kind: SecurityContextConstraints
metadata:
  name: podfabric
  labels: {{- include "podfabric.labels" $root | nindent 4 }}
{{- if .left }}
  annotations:
    {{- include "podfabric.left-behind" "-1" | nindent 4 }}
    meta.helm.sh/release-name: {{ $root.Release.Name }}
    meta.helm.sh/release-namespace: {{ $root.Release.Namespace }}
{{- end }}
users: ["system:serviceaccount:{{ $root.Release.Namespace }}:podfabric"]
allowPrivilegedContainer: false
allowPrivilegeEscalation: false
allowedCapabilities: {{ include "podfabric.capabilities" $root }}
requiredDropCapabilities: []
allowHostDirVolumePlugin: true
allowHostIPC: false
allowHostNetwork: true
allowHostPID: true
allowHostPorts: false
readOnlyRootFilesystem: true
runAsUser: {type: RunAsAny}
fsGroup: {type: RunAsAny}
supplementalGroups: {type: RunAsAny}
seLinuxContext: {type: RunAsAny}
seccompProfiles: [runtime/default]
volumes: [configMap, hostPath{{ if include "podfabric.asks-api" $root }}, projected{{ end }}]
{{- end }}
