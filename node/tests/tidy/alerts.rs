//! The rule for the Prometheus operator is made from the plain rules, which Helm, Compose and
//! promtool read: `UPDATE_EXPECT=1 cargo test -p node --test tidy alerts` writes it.

use expect_test::expect_file;

use super::root;

const HEAD: &str = "\
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: quorate
  labels:
    app.kubernetes.io/name: quorate
    app.kubernetes.io/instance: quorate
spec:
";

#[test]
fn the_operators_rule_has_the_plain_alerts() {
    let folder = root().join("deploy/kubernetes");
    let plain = folder.join("helm/quorate/files/alerts.yaml");
    let plain = std::fs::read_to_string(plain).expect("read the alerts");
    let indented = plain.lines().map(|line| format!("  {line}\n"));
    let rule = HEAD.to_owned() + &indented.collect::<String>();
    expect_file![folder.join("components/monitoring/prometheusrule.yaml")].assert_eq(&rule);
}
