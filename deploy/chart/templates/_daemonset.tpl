{{- /*
The agent's DaemonSet, and the custodian's (`left`), which `helm uninstall` leaves behind. They are
one object: the custodian has the agent's name, selector and mounts. So `helm install` after an
uninstall takes it over and updates it to the agent.
*/}}
{{- define "podfabric.daemonset" -}}
{{- $root := .root -}}
{{- $listen := include "podfabric.listen" $root -}}
{{- $host := $listen | regexFind "^.*:" | trimSuffix ":" | trimAll "[]" -}}
{{- $port := $listen | regexFind "[0-9]+$" | int -}}
{{- $limitsGpus := include "podfabric.limits-gpus" $root -}}
{{- $gpuRuntime := include "podfabric.gpu-runtime" $root -}}
{{- $driverRoot := include "podfabric.driver-root" $root -}}
apiVersion: apps/v1
kind: DaemonSet
metadata:
  name: podfabric
  namespace: {{ $root.Release.Namespace }}
  labels: {{- include "podfabric.labels" $root | nindent 4 }}
{{- if .left }}
  annotations:
    {{- include "podfabric.left-behind" "0" | nindent 4 }}
    meta.helm.sh/release-name: {{ $root.Release.Name }}
    meta.helm.sh/release-namespace: {{ $root.Release.Namespace }}
{{- end }}
spec:
  selector:
    matchLabels: {{- include "podfabric.selector" $root | nindent 6 }}
  # The next agent starts while this one serves, stands by, and serves when this one ends
  # (docs/operate/agent.md). Launchers wait meanwhile, so a pod that starts or ends in an update
  # does not fail.
  updateStrategy: {{- toYaml $root.Values.updateStrategy | nindent 4 }}
  template:
    metadata:
      labels:
        {{- include "podfabric.selector" $root | nindent 8 }}
        {{- with merge dict $root.Values.podLabels $root.Values.commonLabels }}{{ toYaml . | nindent 8 }}{{ end }}
      annotations:
        kubectl.kubernetes.io/default-container: agent
        # A change of this value replaces the agents, one node after the other.
        podfabric.io/settings-at-start: {{ include "podfabric.at-start" $root | quote }}
        {{- with $root.Values.podAnnotations }}{{ toYaml . | nindent 8 }}{{ end }}
    spec:
      serviceAccountName: podfabric
      # With a token of the API server. The node leases blocks of addresses, reads FabricPolicies
      # and writes events with it.
      automountServiceAccountToken: {{ eq (include "podfabric.asks-api" $root) "true" }}
      enableServiceLinks: false
      {{- with include "podfabric.pull-secrets" $root | fromYamlArray }}
      imagePullSecrets: {{- toYaml . | nindent 8 }}
      {{- end }}
      priorityClassName: {{ $root.Values.priorityClassName }}
      # The agent creates, moves and restores interfaces of the host.
      hostNetwork: true
      # The kernel names the owners of RDMA objects by their host pids. NVIDIA's driver does the same
      # for the processes on a GPU.
      hostPID: true
      {{- with $gpuRuntime }}
      # This runtime lets the agent open the GPUs' device nodes, as it lets NVIDIA's device plugin.
      runtimeClassName: {{ . }}
      {{- end }}
      # More than `agent.grace` plus the time that a call may need beyond it.
      terminationGracePeriodSeconds: {{ add 30 (dig "agent" "grace" 60 $root.Values.config | int) }}
      {{- with $root.Values.nodeSelector }}
      nodeSelector: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $root.Values.affinity }}
      affinity: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $root.Values.tolerations }}
      tolerations: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- if not .left }}
      initContainers:
        - name: install
          image: {{ include "podfabric.image" $root }}
          imagePullPolicy: {{ $root.Values.image.pullPolicy }}
          args:
            - install
            {{- with $root.Values.install.plugins }}
            - --plugins={{ join "," . }}
            {{- else }}
            {{- $plugins := list }}
            {{- if $root.Values.ipam.nv_ipam }}{{ $plugins = append $plugins "nv-ipam" }}{{ end }}
            {{- if ne $root.Values.ipam.whereabouts "None" }}{{ $plugins = append $plugins "whereabouts" }}{{ end }}
            {{- with $plugins }}
            - --plugins=ib-sriov,ipoib,podfabric-ipam,podfabric-ipvlan,podfabric-macvlan,rdma,sriov,{{ join "," . }}
            {{- end }}
            {{- end }}
            {{- if $limitsGpus }}
            - --gpu
            {{- end }}
          {{- with $root.Values.resources }}
          resources: {{- toYaml . | nindent 12 }}
          {{- end }}
          terminationMessagePolicy: FallbackToLogsOnError
          # Root, to write files that only root may write, and no capability.
          securityContext:
            runAsUser: 0
            runAsGroup: 0
            allowPrivilegeEscalation: false
            readOnlyRootFilesystem: true
            capabilities: {drop: [ALL]}
            seccompProfile: {type: RuntimeDefault}
            seLinuxOptions: {type: spc_t}
          volumeMounts:
            # The runtime starts CNI executables from this directory of the host.
            - name: cni-bin
              mountPath: /opt/cni/bin
            {{- if $limitsGpus }}
            # Containers with a part of a GPU mount libraries from this directory.
            - name: state
              mountPath: /var/lib/podfabric
            {{- end }}
      {{- end }}
      containers:
        - name: agent
          image: {{ include "podfabric.image" $root }}
          imagePullPolicy: {{ $root.Values.image.pullPolicy }}
          args: [agent{{ if .left }}, --until-empty{{ end }}]
          env:
            # The host's sysctls, because a container's own are read-only.
            - name: PODFABRIC_PROC
              value: /host/proc
            - name: PODFABRIC_KUBELET
              value: {{ $root.Values.host.kubeletDir }}
            # Where the runtime starts the hook for locked memory.
            - name: PODFABRIC_HOST_CNI_BIN
              value: {{ $root.Values.host.cniBinDir }}
            # Where the agents lease addresses, if the cluster manages them.
            - name: NODE_NAME
              valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
            {{- if $limitsGpus }}
            # Where this container has the host's driver files.
            - name: PODFABRIC_HOST
              value: /host/root
            {{- end }}
            {{- if $gpuRuntime }}
            # The GPUs' device nodes that the runtime lets the agent open, and the purpose: NVML.
            - name: NVIDIA_VISIBLE_DEVICES
              value: all
            - name: NVIDIA_DRIVER_CAPABILITIES
              value: utility
            {{- end }}
            {{- with $root.Values.extraEnv }}{{ toYaml . | nindent 12 }}{{ end }}
          {{- with $root.Values.resources }}
          resources: {{- toYaml . | nindent 12 }}
          {{- end }}
          terminationMessagePolicy: FallbackToLogsOnError
          # The default path is below /dev, which is the host's here.
          terminationMessagePath: /run/termination-log
          # No `ports`: in the host's network they would keep the next agent off the node.
          # This probe asks this very agent whether it serves or stands by. The other probes ask the
          # node's address, at which the serving agent answers.
          startupProbe:
            exec: {command: [podfabric, agent, --state]}
            periodSeconds: 2
            timeoutSeconds: 60
            failureThreshold: 90
          # The agent of a very busy node answers late. Ending that agent would make it worse, and
          # in an update an agent that is not ready ends before the next one has started.
          livenessProbe:
            httpGet: {host: {{ $host | quote }}, port: {{ $port }}, path: /healthz}
            periodSeconds: 20
            timeoutSeconds: 30
            failureThreshold: 6
          {{- if .left }}
          # The previous agent answers too until it ends, and has removed nothing.
          {{- end }}
          readinessProbe:
            httpGet: {host: {{ $host | quote }}, port: {{ $port }}, path: {{ .left | ternary "/removed" "/readyz" }}}
            periodSeconds: 5
            timeoutSeconds: 30
            failureThreshold: 12
          securityContext:
            runAsUser: 0
            runAsGroup: 0
            privileged: false
            allowPrivilegeEscalation: false
            readOnlyRootFilesystem: true
            # docs/operate/security.md gives the purpose of each.
            capabilities:
              drop: [ALL]
              add: {{ include "podfabric.capabilities" $root }}
            seccompProfile: {type: RuntimeDefault}
            # A runtime's profile and SELinux' container type deny access to the host's /sys and
            # /proc/sys.
            appArmorProfile: {type: Unconfined}
            seLinuxOptions: {type: spc_t}
          volumeMounts:
            # config.yaml. The kubelet replaces it when the ConfigMap changes.
            - name: config
              mountPath: /etc/podfabric
              readOnly: true
            # The socket that the launchers connect to, and lock files.
            - name: run
              mountPath: /run/podfabric
              {{- if $limitsGpus }}
              # The agent mounts a file system for each container's count of GPU memory on the host.
              mountPropagation: HostToContainer
              {{- end }}
            # The journal, the address store, the allocation checkpoint.
            - name: state
              mountPath: /var/lib/podfabric
            # Other IPAM plugins, which a definition may name.{{ if .left }} The launchers are removed at the end.{{ end }}
            - name: cni-bin
              mountPath: /opt/cni/bin
              readOnly: {{ not .left }}
            # The state of other IPAM plugins (host-local's reservations).
            - name: cni-state
              mountPath: /var/lib/cni
            # `podfabric doctor` checks whether Multus comes first.
            - name: cni-conf
              mountPath: /etc/cni/net.d
              readOnly: true
            # The kubelet's socket, our pools' sockets, and the kubelet's checkpoint.
            - name: device-plugins
              mountPath: {{ $root.Values.host.kubeletDir }}/device-plugins
            # The kubelet's socket for queries about pods' devices.
            - name: pod-resources
              mountPath: {{ $root.Values.host.kubeletDir }}/pod-resources
              readOnly: true
            # CDI specifications of locked memory, pools with `cdi: true` and parts of GPUs.
            - name: cdi
              mountPath: /var/run/cdi
            # Device-information files, which Multus copies into a pod's network-status.
            - name: devinfo
              mountPath: /var/run/k8s.cni.cncf.io/devinfo
            # The numbers of device nodes, which containers get. It is the whole directory, because
            # the kernel replaces /dev/infiniband when drivers are reloaded. No device is opened,
            # except that NVML opens the GPUs' nodes. A pod that is not privileged may not open
            # those, although it sees them: the runtime of gpu.runtimeClassName permits it (the
            # container's device cgroup). Devices on read-only mounts can be written.
            - name: dev
              mountPath: /dev
              readOnly: true
            # HCAs and their state; drivers are bound to VFs here.
            - name: sys
              mountPath: /sys
            # Sysctls of interfaces (a container's own /proc/sys is read-only), the processes in a
            # namespace whose path is gone, NVIDIA's GPUs.
            - name: proc
              mountPath: /host/proc
            # Shows whether a sandbox still exists. Namespaces appear and vanish as on the host.
            - name: netns
              mountPath: /run/netns
              readOnly: true
              mountPropagation: HostToContainer
            {{- if $limitsGpus }}
            # NVIDIA's driver: its libraries, which containers with a part of a GPU get, and NVML.
            # HostToContainer: a driver's container may start later, and a file system that the host
            # unmounts must not stay mounted here.
            - name: driver
              mountPath: /host/root{{ trimSuffix "/" $driverRoot }}
              readOnly: true
              mountPropagation: HostToContainer
            {{- end }}
            {{- range $i, $directory := $root.Values.host.extraDirectories }}
            - name: extra-{{ $i }}
              mountPath: {{ $directory.path }}
              readOnly: {{ $directory.readOnly | default false }}
            {{- end }}
            {{- with $root.Values.extraVolumeMounts }}{{ toYaml . | nindent 12 }}{{ end }}
      volumes:
        - name: config
          configMap:
            name: podfabric
            optional: true # the defaults are right for a custodian
        - name: run
          hostPath: {path: /run/podfabric, type: DirectoryOrCreate}
        - name: state
          hostPath: {path: /var/lib/podfabric, type: DirectoryOrCreate}
        - name: cni-bin
          hostPath: {path: {{ $root.Values.host.cniBinDir }}, type: DirectoryOrCreate}
        - name: cni-state
          hostPath: {path: /var/lib/cni, type: DirectoryOrCreate}
        - name: cni-conf
          hostPath: {path: {{ $root.Values.host.cniConfDir }}, type: DirectoryOrCreate}
        - name: device-plugins
          hostPath: {path: {{ $root.Values.host.kubeletDir }}/device-plugins, type: DirectoryOrCreate}
        - name: pod-resources
          hostPath: {path: {{ $root.Values.host.kubeletDir }}/pod-resources, type: DirectoryOrCreate}
        - name: cdi
          hostPath: {path: /var/run/cdi, type: DirectoryOrCreate}
        - name: devinfo
          hostPath: {path: /var/run/k8s.cni.cncf.io/devinfo, type: DirectoryOrCreate}
        - name: dev
          hostPath: {path: /dev, type: Directory}
        - name: sys
          hostPath: {path: /sys, type: Directory}
        - name: proc
          hostPath: {path: /proc, type: Directory}
        - name: netns
          hostPath: {path: /run/netns, type: DirectoryOrCreate}
        {{- if $limitsGpus }}
        - name: driver
          hostPath: {path: {{ $driverRoot }}, type: DirectoryOrCreate}
        {{- end }}
        {{- range $i, $directory := $root.Values.host.extraDirectories }}
        - name: extra-{{ $i }}
          hostPath: {path: {{ $directory.path }}, type: DirectoryOrCreate}
        {{- end }}
        {{- with $root.Values.extraVolumes }}{{ toYaml . | nindent 8 }}{{ end }}
{{- end }}
