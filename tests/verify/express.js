// Payments on Express: as most people write them, and with a guard that looks first and claims later.
const express = require('express')

const app = express()
const payments = []
const answers = new Map()
app.use(express.json({ limit: '1mb' }))

const pay = async (request, response) => {
  await new Promise((resolve) => setTimeout(resolve, 20))
  payments.push(request.body.amount)
  response.status(201).location(`/payments/${payments.length}`).json({ id: payments.length })
}

app.post('/plain/payments', pay)

app.post('/guarded/payments', async (request, response) => {
  const key = request.get('Idempotency-Key')
  const body = JSON.stringify(request.body)
  const found = key && answers.get(key)
  if (found && found.body !== body) return response.status(422).json({ error: 'key reused' })
  if (found) return response.status(201).location(found.location).json(found.json)
  await pay(request, response)
  if (key) answers.set(key, { body, json: { id: payments.length }, location: response.get('Location') })
})

app.get('/count', (_, response) => response.json({ n: payments.length }))
const server = app.listen(0, '127.0.0.1', () => console.log(server.address().port))
