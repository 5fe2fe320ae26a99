{{- /* The objects of a kustomize overlay, which `make chart` has put into files/, with the values applied. */ -}}
{{- $v := .Values -}}
{{- $namespace := .Release.Namespace -}}
{{- $file := printf "files/%s.yaml" $v.overlay -}}
{{- $text := .Files.Get $file | required (printf "the chart has no %s: `make chart` writes it" $file) -}}
{{- $text = $text | replace "namespace: outrider\n" (printf "namespace: %s\n" $namespace) -}}
{{- $text = regexReplaceAll "([a-z]\\.)outrider(\\.svc|\\n)" $text (printf "${1}%s${2}" $namespace) -}}
{{- $models := dict -}}
{{- range $role, $model := $v.models -}}
  {{- range $key := list "name" "revision" -}}
    {{- with index $model $key -}}
      {{- $_ := set $models (printf "%s-%s" $role (eq $key "name" | ternary "model" $key)) . -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- if $models -}}
  {{- /* Pods start anew when a model changes: the name of the ConfigMap is another one. */ -}}
  {{- $text = regexReplaceAll "\\bmodels-[a-z0-9]{10}\\b" $text (printf "models-%s" (toJson $models | sha256sum | trunc 10)) -}}
{{- end -}}
{{- range $document := splitList "\n---\n" $text -}}
{{- $object := fromYaml $document -}}
{{- $kind := $object.kind -}}
{{- $name := $object.metadata.name -}}
{{- $service := dig "metadata" "labels" "app.kubernetes.io/component" "" $object -}}
{{- if and (eq $kind "ConfigMap") (hasPrefix "models-" $name) -}}
  {{- $_ := set $object "data" (mergeOverwrite $object.data $models) -}}
{{- end -}}
{{- if eq $kind "PersistentVolumeClaim" -}}
  {{- with index $v.storage (trimSuffix "-model" $name) }}{{ $_ := set $object.spec.resources.requests "storage" . }}{{ end -}}
  {{- with $v.storage.className }}{{ $_ := set $object.spec "storageClassName" . }}{{ end -}}
  {{- with $v.storage.accessModes }}{{ $_ := set $object.spec "accessModes" . }}{{ end -}}
{{- end -}}
{{- if eq $kind "HorizontalPodAutoscaler" -}}
  {{- range $key, $number := $v.gateway }}{{ with $number }}{{ $_ := set $object.spec $key . }}{{ end }}{{ end -}}
{{- end -}}
{{- if has $kind (list "Deployment" "StatefulSet" "Job") -}}
  {{- $pod := $object.spec.template.spec -}}
  {{- with index $v.replicas $service }}{{ $_ := set $object.spec "replicas" . }}{{ end -}}
  {{- if $v.image.pullSecrets -}}
    {{- $secrets := list -}}
    {{- range $v.image.pullSecrets }}{{ $secrets = append $secrets (dict "name" .) }}{{ end -}}
    {{- $_ := set $pod "imagePullSecrets" $secrets -}}
  {{- end -}}
  {{- if not $v.nodeLabels }}{{ $_ := unset $pod "nodeSelector" }}{{ end -}}
  {{- if not $v.priorityClasses }}{{ $_ := unset $pod "priorityClassName" }}{{ end -}}
  {{- range $container := concat (default list $pod.initContainers) $pod.containers -}}
    {{- if hasPrefix "outrider/" $container.image -}}
      {{- $image := splitList ":" (trimPrefix "outrider/" $container.image) -}}
      {{- $registry := default "outrider" $v.image.registry -}}
      {{- $_ := set $container "image" (printf "%s/%s:%s" $registry (first $image) (default (last $image) $v.image.tag)) -}}
    {{- end -}}
    {{- if eq $container.name $service -}}
      {{- with index $v.resources $service }}{{ $_ := set $container "resources" (mergeOverwrite $container.resources (deepCopy .)) }}{{ end -}}
      {{- with index $v.env $service -}}
        {{- $variables := list -}}
        {{- range $variable := $container.env }}{{ if not (hasKey (index $v.env $service) $variable.name) }}{{ $variables = append $variables $variable }}{{ end }}{{ end -}}
        {{- range $key, $value := . }}{{ $variables = append $variables (dict "name" $key "value" $value) }}{{ end -}}
        {{- $_ := set $container "env" $variables -}}
      {{- end -}}
    {{- end -}}
    {{- if $v.gpu.resource -}}
      {{- range $part := list "requests" "limits" -}}
        {{- $amounts := index $container.resources $part -}}
        {{- if hasKey $amounts "nvidia.com/gpu" -}}
          {{- $_ := set $amounts $v.gpu.resource (index $amounts "nvidia.com/gpu") -}}
          {{- $_ := unset $amounts "nvidia.com/gpu" -}}
        {{- end -}}
      {{- end -}}
    {{- end -}}
    {{- range $variable := $container.env -}}
      {{- $secret := dig "valueFrom" "secretKeyRef" dict $variable -}}
      {{- if and $v.huggingface.secret (eq (default "" $secret.name) "huggingface") }}{{ $_ := set $secret "name" $v.huggingface.secret }}{{ end -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- if eq $kind "Job" -}}
  {{- /* A job cannot be changed: another one has another name. */ -}}
  {{- $_ := set $object.metadata "name" (printf "%s-%s" $name (toJson $object.spec | sha256sum | trunc 8)) -}}
{{- end -}}
{{- $left := list "Namespace" -}}
{{- if not $v.priorityClasses }}{{ $left = append $left "PriorityClass" }}{{ end -}}
{{- if not $v.networkPolicies }}{{ $left = append $left "NetworkPolicy" }}{{ end -}}
{{- if not (has $kind $left) }}
---
{{ toYaml $object }}
{{- end -}}
{{- end }}
{{- if $v.tenants }}
---
apiVersion: v1
kind: Secret
metadata:
  name: callers
  namespace: {{ $namespace }}
stringData:
  callers.json: {{ toJson $v.tenants | quote }}
{{- end }}
{{- if $v.redis.createSecret }}
{{- /* Once: an upgrade finds it. */}}
{{- $found := dig "data" "password" "" (lookup "v1" "Secret" $namespace "redis") }}
---
apiVersion: v1
kind: Secret
metadata:
  name: redis
  namespace: {{ $namespace }}
data:
  password: {{ default (randAlphaNum 64 | b64enc) $found }}
{{- end }}
