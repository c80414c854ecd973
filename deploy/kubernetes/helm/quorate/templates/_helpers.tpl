{{- define "quorate.name" -}}
{{- if contains "quorate" .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-quorate" .Release.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "quorate.selector" -}}
app.kubernetes.io/name: quorate
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "quorate.labels" -}}
{{ include "quorate.selector" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "quorate.secret" -}}
{{ .Values.secrets.name | default (include "quorate.name" .) }}
{{- end }}

{{/* The Secret with the certificate of the admin listener; empty: it has none. */}}
{{- define "quorate.certificate" -}}
{{- if .Values.certificates.secretName }}{{ .Values.certificates.secretName }}{{ else if .Values.certificates.certManager.enabled }}{{ include "quorate.name" . }}-admin{{ end }}
{{- end }}

{{- define "quorate.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (include "quorate.name" .) }}
{{- end }}
