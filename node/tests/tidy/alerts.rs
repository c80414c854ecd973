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

#[test]
fn each_alert_links_to_a_section_of_its_own() {
    let folder = root().join("deploy/kubernetes/helm/quorate/files");
    let rules = std::fs::read_to_string(folder.join("alerts.yaml")).expect("read the alerts");
    let runbook = root().join("docs/guide/runbook.md");
    let runbook = std::fs::read_to_string(runbook).expect("read the runbook");
    let after = |prefix: &'static str| {
        let lines = rules
            .lines()
            .map(|line| line.trim().trim_start_matches("- "));
        lines.filter_map(move |line| line.strip_prefix(prefix))
    };
    let alerts: Vec<&str> = after("alert: ").collect();
    let urls: Vec<&str> = after("runbook_url: ").collect();
    let expected = alerts.iter().map(|alert| {
        let section = alert.to_lowercase();
        format!("https://github.com/quorate/quorate/blob/main/docs/guide/runbook.md#{section}")
    });
    assert_eq!(urls, expected.collect::<Vec<_>>());
    for alert in alerts {
        assert!(runbook.contains(&format!("\n### {alert}\n")), "{alert}");
    }
}
