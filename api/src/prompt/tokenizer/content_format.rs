//! Determines whether a chat template reads contents as lists of parts, as engines do: by the loops
//! in its source.
//!
//! Engines do not try the template. vLLM looks for a loop over the content of a message
//! (`renderers/hf.py` of 0.32), SGLang for words of media and for such a loop
//! (`parser/jinja_template_utils.py` of 0.5.23); both reimplemented, not copied. Whoever tries the
//! template finds more: Kimi's templates can read lists, but the loop is in a macro.

use std::collections::BTreeSet;

use minijinja::Error;
use minijinja::machinery::ast::{Call, CallArg, Expr, ForLoop, Macro, Stmt};
use minijinja::machinery::parse;
use minijinja::syntax::SyntaxConfig;

use super::sglang::ChatRenderer;

/// Which engines give a template lists of parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct PartReaders {
    vllm: bool,
    sglang: bool,
}

impl PartReaders {
    pub(super) fn of(source: &str, syntax: SyntaxConfig) -> Result<Self, Error> {
        let template = parse(source, "chat_template", syntax)?;
        let mut nodes = TemplateNodes::default();
        nodes.visit(&template);
        let names_media = ["image", "audio", "video", "vision"];
        Ok(Self {
            vllm: nodes.vllm_finds_a_loop().unwrap_or(false),
            sglang: names_media.iter().any(|name| source.contains(name))
                || nodes.sglang_finds_a_loop(),
        })
    }

    /// Whether an engine like `renderer` gives the template lists of parts.
    pub(super) fn contain(self, renderer: ChatRenderer) -> bool {
        match renderer {
            ChatRenderer::Vllm => self.vllm,
            ChatRenderer::Sglang => self.sglang,
        }
    }
}

/// The search met a loop or an assignment with several targets, at which vLLM's gives up.
struct SeveralTargets;

/// Nodes of a template that the searches look at, in the order of the source.
#[derive(Default)]
struct TemplateNodes<'n, 's> {
    /// Targets and values of assignments.
    assignments: Vec<(&'n Expr<'s>, &'n Expr<'s>)>,
    /// Loops, with the macros around them by their place in `macros`.
    loops: Vec<(&'n ForLoop<'s>, Vec<usize>)>,
    macros: Vec<&'n Macro<'s>>,
    calls: Vec<&'n Call<'s>>,
    /// Macros around the current node.
    around: Vec<usize>,
}

impl<'n, 's> TemplateNodes<'n, 's> {
    /// Whether there is a loop over the content of a message.
    fn vllm_finds_a_loop(&self) -> Result<bool, SeveralTargets> {
        let messages = self.names_of_messages()?;
        let is_content = |expr: &Expr<'_>| messages.iter().any(|it| is_field(expr, it, "content"));
        for (each, around) in &self.loops {
            let over = match &each.iter {
                Expr::Var(name) => Some(name.id),
                _ => None,
            };
            let is_parameter = || {
                let given = around
                    .iter()
                    .rev()
                    .map(|at| self.parameters(*at, &is_content));
                let given = given.into_iter().find(|names| !names.is_empty());
                over.is_some_and(|over| given.is_some_and(|names| names.contains(over)))
            };
            let is_named = || over == Some("content") && around.is_empty();
            if is_content(&each.iter) || is_parameter() || is_named() {
                return name(&each.target).map(|_| true);
            }
        }
        Ok(false)
    }

    /// Returns the variables of the loops over messages.
    fn names_of_messages(&self) -> Result<BTreeSet<&'n str>, SeveralTargets> {
        let mut lists = vec!["messages"];
        let mut next = 0;
        while let Some(list) = lists.get(next).copied() {
            next += 1;
            for (target, value) in &self.assignments {
                if is_variable(value, list) {
                    let target = name(target)?;
                    if !lists.contains(&target) {
                        lists.push(target);
                    }
                }
            }
        }
        let loops = self.loops.iter().map(|(each, _)| *each);
        let over_messages = loops.filter(|each| lists.iter().any(|it| is_variable(&each.iter, it)));
        over_messages.map(|each| name(&each.target)).collect()
    }

    /// Returns the parameters of a macro that receive the content of a message in some call.
    fn parameters(&self, at: usize, is_content: &dyn Fn(&Expr<'_>) -> bool) -> BTreeSet<&'n str> {
        let called = self.macros[at];
        let names = called.args.iter().filter_map(|it| name(it).ok());
        let names = names.collect::<Vec<&str>>();
        let is_its = |call: &&&Call<'_>| name(&call.expr).is_ok_and(|it| it == called.name);
        let mut given = BTreeSet::new();
        for call in self.calls.iter().filter(is_its) {
            for (place, argument) in call.args.iter().enumerate() {
                let parameter = match argument {
                    CallArg::Pos(value) if is_content(value) => names.get(place),
                    CallArg::Kwarg(name, value) if is_content(value) => {
                        names.iter().find(|it| *it == name)
                    }
                    _ => None,
                };
                given.extend(parameter);
            }
        }
        given
    }

    /// Whether there is a loop over the content of a variable that is named like a message.
    fn sglang_finds_a_loop(&self) -> bool {
        let is_content = |expr| {
            ["message", "msg", "m"]
                .iter()
                .any(|it| is_field(expr, it, "content"))
        };
        self.loops.iter().any(|(each, _)| is_content(&each.iter))
    }

    fn visit_all(&mut self, stmts: &'n [Stmt<'s>]) {
        stmts.iter().for_each(|stmt| self.visit(stmt));
    }

    fn visit(&mut self, stmt: &'n Stmt<'s>) {
        match stmt {
            Stmt::Template(it) => self.visit_all(&it.children),
            Stmt::EmitExpr(it) => self.look(&it.expr),
            Stmt::ForLoop(it) => {
                self.loops.push((it, self.around.clone()));
                self.look(&it.iter);
                it.filter_expr.iter().for_each(|expr| self.look(expr));
                self.visit_all(&it.body);
                self.visit_all(&it.else_body);
            }
            Stmt::IfCond(it) => {
                self.look(&it.expr);
                self.visit_all(&it.true_body);
                self.visit_all(&it.false_body);
            }
            Stmt::WithBlock(it) => {
                it.assignments
                    .iter()
                    .for_each(|(_, value)| self.look(value));
                self.visit_all(&it.body);
            }
            Stmt::Set(it) => {
                self.assignments.push((&it.target, &it.expr));
                self.look(&it.expr);
            }
            Stmt::SetBlock(it) => {
                it.filter.iter().for_each(|expr| self.look(expr));
                self.visit_all(&it.body);
            }
            Stmt::AutoEscape(it) => self.visit_all(&it.body),
            Stmt::FilterBlock(it) => {
                self.look(&it.filter);
                self.visit_all(&it.body);
            }
            Stmt::Macro(it) => {
                self.around.push(self.macros.len());
                self.macros.push(it);
                it.defaults.iter().for_each(|expr| self.look(expr));
                self.visit_all(&it.body);
                self.around.pop();
            }
            Stmt::CallBlock(it) => {
                self.look_at_call(&it.call);
                self.visit_all(&it.macro_decl.body);
            }
            Stmt::Do(it) => self.look_at_call(&it.call),
            // Chat templates have no other templates to take parts from.
            _ => {}
        }
    }

    fn look_at_call(&mut self, call: &'n Call<'s>) {
        self.calls.push(call);
        self.look(&call.expr);
        self.look_at_arguments(&call.args);
    }

    fn look_at_arguments(&mut self, arguments: &'n [CallArg<'s>]) {
        for argument in arguments {
            match argument {
                CallArg::Pos(expr)
                | CallArg::Kwarg(_, expr)
                | CallArg::PosSplat(expr)
                | CallArg::KwargSplat(expr) => self.look(expr),
            }
        }
    }

    fn look(&mut self, expr: &'n Expr<'s>) {
        match expr {
            Expr::Var(_) | Expr::Const(_) => {}
            Expr::Slice(it) => {
                self.look(&it.expr);
                let bounds = it.start.iter().chain(&it.stop).chain(&it.step);
                bounds.for_each(|bound| self.look(bound));
            }
            Expr::UnaryOp(it) => self.look(&it.expr),
            Expr::BinOp(it) => {
                self.look(&it.left);
                self.look(&it.right);
            }
            Expr::Compare(it) => {
                self.look(&it.expr);
                it.ops.iter().for_each(|with| self.look(&with.expr));
            }
            Expr::IfExpr(it) => {
                self.look(&it.test_expr);
                self.look(&it.true_expr);
                it.false_expr.iter().for_each(|expr| self.look(expr));
            }
            Expr::Filter(it) => {
                it.expr.iter().for_each(|expr| self.look(expr));
                self.look_at_arguments(&it.args);
            }
            Expr::Test(it) => {
                self.look(&it.expr);
                self.look_at_arguments(&it.args);
            }
            Expr::GetAttr(it) => self.look(&it.expr),
            Expr::GetItem(it) => {
                self.look(&it.expr);
                self.look(&it.subscript_expr);
            }
            Expr::Call(it) => self.look_at_call(it),
            Expr::List(it) => it.items.iter().for_each(|item| self.look(item)),
            Expr::Tuple(it) => it.items.iter().for_each(|item| self.look(item)),
            Expr::Map(it) => it
                .keys
                .iter()
                .chain(&it.values)
                .for_each(|item| self.look(item)),
        }
    }
}

/// Returns the name of a variable.
fn name<'s>(expr: &Expr<'s>) -> Result<&'s str, SeveralTargets> {
    match expr {
        Expr::Var(variable) => Ok(variable.id),
        _ => Err(SeveralTargets),
    }
}

/// Takes filters, tests and slices off: they leave elements of what they are applied to.
fn elements<'e, 's>(expr: &'e Expr<'s>) -> Option<&'e Expr<'s>> {
    match expr {
        Expr::Filter(it) => elements(it.expr.as_ref()?),
        Expr::Test(it) => elements(&it.expr),
        Expr::Slice(it) => elements(&it.expr),
        other => Some(other),
    }
}

/// Whether `expr` is the variable `wanted` or elements of it.
fn is_variable(expr: &Expr<'_>, wanted: &str) -> bool {
    elements(expr).is_some_and(|expr| name(expr).is_ok_and(|it| it == wanted))
}

/// Whether `expr` is the `field` of the variable `of`, or elements of it.
fn is_field(expr: &Expr<'_>, of: &str, field: &str) -> bool {
    let is_its = |expr: &Expr<'_>| name(expr).is_ok_and(|it| it == of);
    match elements(expr) {
        Some(Expr::GetAttr(it)) => it.name == field && is_its(&it.expr),
        Some(Expr::GetItem(it)) => match &it.subscript_expr {
            Expr::Const(key) => key.value.as_str() == Some(field) && is_its(&it.expr),
            _ => false,
        },
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(body: &str, vllm: bool, sglang: bool) {
        let readers = PartReaders::of(body, SyntaxConfig::default()).unwrap();
        assert_eq!(readers, PartReaders { vllm, sglang }, "{body}");
    }

    const EACH: &str = "{% for message in messages %}";
    const PART: &str = "{{ part.text }}{% endfor %}{% endfor %}";

    /// Checks a loop over `content` in a loop over messages.
    #[track_caller]
    fn check_loop(content: &str, vllm: bool, sglang: bool) {
        let source = format!("{EACH}{{% for part in {content} %}}{PART}");
        check(&source, vllm, sglang);
    }

    #[test]
    fn loops_over_contents_read_parts() {
        check_loop("message.content", true, true);
        check_loop("message['content']", true, true);
        check_loop("message['content'][1:] | list", true, true);
        check_loop("message.content is iterable", true, true);
        // Whatever it holds, except in a macro.
        check_loop("content", true, false);
        check_loop("message.get('content')", false, false);
        check_loop("message.parts", false, false);
        check_loop("message['parts']", false, false);
        check_loop("message", false, false);
        check_loop("message[content]", false, false);
        check("{{ messages[0].content }}", false, false);
    }

    #[test]
    fn messages_are_followed_through_assignments_for_vllm() {
        let then = format!("{{% for turn in rest %}}{{% for part in turn.content %}}{PART}");
        let set = |what: &str| format!("{{% set {what} %}}{then}");
        check(&set("rest = messages[1:]"), true, false);
        check(
            &set("all = messages %}{% set rest = all | list"),
            true,
            false,
        );
        check(&set("rest = messages.x"), false, false);
        // It gives up, as at a loop over several variables.
        check(
            &set("rest = messages %}{% set ns.all = messages"),
            false,
            false,
        );
        check(
            &set("rest = messages %}{% set a, b = messages"),
            false,
            false,
        );
        let pairs = "{% for a, message in messages %}{% for part in message.content %}";
        check(&format!("{pairs}{PART}"), false, true);
        check(
            &format!("{EACH}{{% for a, b in message.content %}}{PART}"),
            false,
            true,
        );
    }

    #[test]
    fn macros_read_parts_for_vllm_if_a_call_gives_them_a_content() {
        let with = |parameter: &str, call: &str| {
            let body = format!("{{% for part in {parameter} %}}{{{{ part }}}}{{% endfor %}}");
            let print = format!("{{% macro print(role, given) %}}{body}{{% endmacro %}}");
            format!("{print}{EACH}{{{{ '<' ~ print({call}) }}}}{{% endfor %}}")
        };
        check(&with("given", "message.role, message.content"), true, false);
        check(&with("given", "'a', given=message['content']"), true, false);
        check(
            &with("given", "message.content, message.role"),
            false,
            false,
        );
        check(&with("given", "'a', message"), false, false);
        check(&with("given.content", "'a', message"), false, false);
        check(&with("content", "'a', message.content"), false, false);
    }

    #[test]
    fn words_of_media_are_enough_for_sglang() {
        check("{# no images #}{{ messages[0].content }}", false, true);
    }
}
