//! Tests of `--backend`, and of variables that name no key.

use super::*;

fn with_backends(file: &str, backends: &[String]) -> Result<Loaded, ConfigErrors> {
    let layers = Layers {
        file,
        backends,
        ..Layers::default()
    };
    read("n3.toml", &layers)
}

fn shown(config: &Config) -> String {
    let backends = config.backends.iter();
    let backends: Vec<_> = backends.map(|it| format!("{} {}", it.id, it.url)).collect();
    backends.join("\n")
}

#[test]
fn backends_on_the_command_line_need_no_file() {
    let urls = ["http://gpu-1/", "http://10.0.0.2:8000/v/m"].map(str::to_owned);
    let tls = with_backends("", &["https://gpu-1".to_owned()]).unwrap();
    assert_eq!(shown(&tls.config), "gpu-1-443 https://gpu-1:443");
    let config = with_backends("", &urls).unwrap().config;
    assert_eq!(config.id, ReplicaId(1));
    let expected = "gpu-1-80 http://gpu-1:80\n10.0.0.2-8000-v-m http://10.0.0.2:8000/v/m";
    assert_eq!(shown(&config), expected);
    let file = "node.id = 3\n[[backends]]\nid = \"a\"\nurl = \"http://a:1\"\n";
    let config = with_backends(file, &urls[..1]).unwrap().config;
    assert_eq!(config.id, ReplicaId(3));
    assert_eq!(shown(&config), "a http://a:1\ngpu-1-80 http://gpu-1:80");
    let faults = with_backends("", &["ftp://gpu-1".to_owned()]).unwrap_err();
    let told = brief(&faults);
    assert!(told.contains("--backend ftp://gpu-1"), "{told}");
    assert!(told.contains("expected a URL, such as"), "{told}");
    let twice = with_backends("", &[urls[0].clone(), urls[0].clone()]);
    assert!(twice.is_err(), "two backends of one id");
}

#[test]
fn lists_of_tables_in_variables_are_errors() {
    for (name, list) in [
        ("QUORATE_BACKENDS", "[[backends]]"),
        ("QUORATE_MODELS", "[[models]]"),
        ("QUORATE_SESSIONS__HEADERS", "[[sessions.headers]]"),
        ("QUORATE_DISCOVERY", "[[discovery]]"),
        ("QUORATE_BACKENDS__0__URL", "[[backends]]"),
        ("QUORATE_DISCOVERY__0__KIND", "[[discovery]]"),
        ("QUORATE_DISCOVERY__KIND", "[[discovery]]"),
    ] {
        let variables = variables(&[("QUORATE_NODE__ID", "1"), (name, "http://a:1")]);
        let told = brief(&layers("", &variables, &[]).unwrap_err());
        let expected = format!("{name}: names no key (expected {list} in the config file");
        assert!(told.contains(&expected), "{told}");
    }
    let service = variables(&[
        ("QUORATE_NODE__ID", "1"),
        ("QUORATE_PORT", "tcp://10.0.0.1"),
    ]);
    assert!(layers("", &service, &[]).is_ok());
}
