{{- define "kvferry.name" -}}
{{- if contains "kvferry" .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-kvferry" .Release.Name | trunc 40 | trimSuffix "-" }}{{ end -}}
{{- end }}

{{- define "kvferry.selector" -}}
app.kubernetes.io/name: kvferry
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvferry.labels" -}}
{{ include "kvferry.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "kvferry.image" -}}
{{- if .Values.image.digest }}{{ .Values.image.repository }}@{{ .Values.image.digest }}{{ else }}{{ .Values.image.repository }}:{{ .Values.image.tag }}{{ end -}}
{{- end }}

{{- define "kvferry.agentKind" -}}
{{- $roles := 0 }}
{{- range .Values.agents.roles }}{{ if gt (int .replicas) 0 }}{{ $roles = add1 $roles }}{{ end }}{{ end }}
{{- if and (eq .Values.agents.kind "DisaggregatedSet") (lt (int $roles) 2) }}
{{- fail "agents.kind DisaggregatedSet needs two roles with replicas; take Deployment for one" }}
{{- else if ne .Values.agents.kind "auto" }}{{ .Values.agents.kind }}
{{- else if and (ge (int $roles) 2) (.Capabilities.APIVersions.Has "disaggregatedset.x-k8s.io/v1/DisaggregatedSet") }}DisaggregatedSet
{{- else }}Deployment{{ end -}}
{{- end }}

{{- define "kvferry.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "kvferry.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- with .capabilities }}
  add: {{ toJson . }}
{{- end }}
{{- end }}

{{/* Where a Pod runs, and as whom. Call with the values of the proxies or agents. */}}
{{- define "kvferry.scheduling" -}}
{{- range $field := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" }}
{{- with index $ $field }}
{{ $field }}: {{ toJson . }}
{{- end }}
{{- end }}
{{- range $field := list "priorityClassName" "serviceAccountName" }}
{{- with index $ $field }}
{{ $field }}: {{ . }}
{{- end }}
{{- end }}
{{- end }}

{{/* The Pod of one role. Call with a dict: root, role, settings. */}}
{{- define "kvferry.agentPod" -}}
{{- $root := .root }}
{{- $values := .root.Values }}
{{- $agents := $values.agents }}
{{- $secure := not $values.security.insecure }}
{{- $proxies := printf "dns:%s-discovery:%d" (include "kvferry.name" $root) (int $values.proxy.discoveryPort) }}
metadata:
  labels:
    {{- include "kvferry.selector" $root | nindent 4 }}
    app.kubernetes.io/component: agent
    kvferry/role: {{ .role }}
  {{- with $agents.podAnnotations }}
  annotations: {{ toJson . }}
  {{- end }}
spec:
  automountServiceAccountToken: false
  # The agent ends by itself once nobody needs it: drain, then leases that have lapsed; see docs/rolling.md.
  terminationGracePeriodSeconds: {{ add (int $values.drainSeconds) (ceil $agents.leaseSeconds | int) 10 }}
  securityContext:
    {{- include "kvferry.podSecurity" $root | nindent 4 }}
    {{- with $agents.supplementalGroups }}
    supplementalGroups: {{ toJson . }}
    {{- end }}
  {{- with $values.imagePullSecrets }}
  imagePullSecrets: {{ toJson . }}
  {{- end }}
  {{- if $agents.hostIPC }}
  hostIPC: true
  {{- end }}
  {{- if $agents.hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  {{- include "kvferry.scheduling" (merge (dict "nodeSelector" .settings.nodeSelector "affinity" .settings.affinity) $agents) | nindent 2 }}
  {{- with $agents.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $agents.initContainers }}
  initContainers: {{ toJson . }}
  {{- end }}
  containers:
    - name: agent
      {{- if eq $agents.engine "sidecar" }}
      image: {{ required "sidecar.image is needed with agents.engine sidecar" $values.sidecar.image }}
      {{- with $values.sidecar.command }}
      command: {{ toJson . }}
      {{- end }}
      args: {{ concat (index $values.sidecar.args .role | default list) .settings.args | toJson }}
      {{- else }}
      image: {{ include "kvferry.image" $root }}
      command: [kvferry, agent]
      args:
        {{- if eq $agents.engine "vllm" }}
        - --engine=vllm
        {{- end }}
        - --drain-s={{ $values.drainSeconds }}
        - --role={{ .role }}
        - --model={{ $agents.model }}
        {{- with $agents.servedModelName }}
        - --served-model-name={{ . }}
        {{- end }}
        - --host=$(POD_IP)
        - --port={{ $agents.port }}
        - --control-port={{ $agents.controlPort }}
        - --proxy={{ $proxies }}
        - --transfer={{ $agents.transfer }}
        - --lease-s={{ $agents.leaseSeconds }}
        {{- if $secure }}
        - --cluster-key=/etc/kvferry/cluster/cluster.key
        {{- end }}
        {{- range concat $agents.args .settings.args }}
        - {{ . | quote }}
        {{- end }}
        {{- if and (eq $agents.engine "vllm") $agents.engineArgs }}
        - --
        {{- range $agents.engineArgs }}
        - {{ . | quote }}
        {{- end }}
        {{- end }}
      {{- end }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      env:
        - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
        - {name: HOME, value: /tmp}
        {{- with $agents.hfTokenSecret }}
        - {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: {{ . }}, key: token}}}
        {{- end }}
        {{- with $agents.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        - {name: http, containerPort: {{ $agents.port }}}
        {{- if ne $agents.engine "sidecar" }}
        - {name: control, containerPort: {{ $agents.controlPort }}}
        {{- end }}
      {{- /* Starting: /ready, for as long as a model takes. Ready, and not draining: /ready. Dead: /health, which does
             not wait for a GPU that is busy. */}}
      {{- $health := ternary $values.sidecar.healthPath "/health" (eq $agents.engine "sidecar") }}
      {{- $ready := ternary "/ready" $health (eq $agents.engine "kvferry") }}
      startupProbe:
        httpGet: {path: {{ $ready }}, port: http}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ div (add $agents.startupSeconds 4) 5 }}
      readinessProbe:
        httpGet: {path: {{ $ready }}, port: http}
        periodSeconds: 2
        timeoutSeconds: 5
        failureThreshold: 2
      livenessProbe:
        httpGet: {path: {{ $health }}, port: http}
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: 6
      resources: {{ toJson .settings.resources }}
      securityContext:
        {{- if eq $agents.engine "sidecar" }}
        allowPrivilegeEscalation: false
        capabilities: {{ dict "drop" (list "ALL") "add" $agents.capabilities | toJson }}
        {{- else }}
        {{- include "kvferry.containerSecurity" (dict "capabilities" $agents.capabilities) | nindent 8 }}
        {{- end }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: shm, mountPath: /dev/shm}
        {{- if and $secure (ne $agents.engine "sidecar") }}
        - {name: cluster-key, mountPath: /etc/kvferry/cluster, readOnly: true}
        {{- end }}
        {{- if $agents.modelVolume }}
        - {name: models, mountPath: /models, readOnly: true}
        {{- end }}
        {{- range $agents.volumeMounts }}
        - {{ toJson . }}
        {{- end }}
    {{- if eq $agents.engine "sidecar" }}
    - name: sidecar
      image: {{ include "kvferry.image" $root }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      command: [kvferry, agent]
      args:
        - --attach=http://127.0.0.1:{{ $agents.port }}
        - --advertise-url=http://$(POD_IP):{{ $agents.port }}
        - --role={{ .role }}
        - --dialect={{ $values.sidecar.dialect }}
        - --proxy={{ $proxies }}
        {{- if $secure }}
        - --cluster-key=/etc/kvferry/cluster/cluster.key
        {{- end }}
        {{- range $values.sidecar.attachArgs }}
        - {{ . | quote }}
        {{- end }}
      env:
        - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
        - {name: HOME, value: /tmp}
      resources:
        requests: {cpu: 50m, memory: 128Mi}
        limits: {memory: 512Mi}
      securityContext:
        {{- include "kvferry.containerSecurity" dict | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        {{- if $secure }}
        - {name: cluster-key, mountPath: /etc/kvferry/cluster, readOnly: true}
        {{- end }}
    {{- end }}
  volumes:
    - {name: tmp, emptyDir: {}}
    - {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ $agents.sharedMemory }}}}
    {{- if $secure }}
    - {name: cluster-key, secret: {secretName: {{ $values.security.clusterKeySecret }}, defaultMode: 0400}}
    {{- end }}
    {{- with $agents.modelVolume }}
    - {{ merge (dict "name" "models") . | toJson }}
    {{- end }}
    {{- range $agents.volumes }}
    - {{ toJson . }}
    {{- end }}
{{- end }}
